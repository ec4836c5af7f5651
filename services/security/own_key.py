"""The key by which this process calls other parts, from a file that is read again when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Annotated

from services.logs import log_event
from services.security.keys import LONGEST_KEY
from services.settings import Option
from services.watched_file import WatchedFile
from simulator.codec import read_text

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the file

PartKeyFile = Annotated[
    str,
    Option(
        "File with the API key by which this part calls others, where they have an --api-key-file; it is read again "
        "when it changes.",
        metavar="FILE",
    ),
]


class OwnKey:
    """A key, or none; as metadata of calls."""

    def __init__(self, path: str = "", key: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read a file, if one is named, else take a key; ValueError where it is none."""
        self._clock = clock
        self._file = WatchedFile(path, key_from_file) if path else None
        self._problem = ""
        self._looked_s = clock()
        self._metadata = metadata_of(key)
        if self._file is not None:
            self._metadata = metadata_of(self._file.read_if_changed() or "")

    def __bool__(self) -> bool:
        """Return whether there is a key."""
        return bool(self._metadata)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call, empty without a key."""
        if self._file is not None and (now_s := self._clock()) - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(self._file)
        return self._metadata

    def _look(self, file: WatchedFile[str]) -> None:
        try:
            key = file.read_if_changed()
        except ValueError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log_event(log, logging.ERROR, "own API key is invalid, keeping the last one", reason=str(error))
            return
        if key is not None:
            self._problem = ""
            self._metadata = metadata_of(key)
            log_event(log, logging.INFO, "own API key changed", file=file.path)


def key_from_file(path: str) -> str:
    """Read a file that holds one key; errors name the file, and show nothing of it."""
    key = read_text(path).strip()
    if not key or len(key) > LONGEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{path}: must hold one API key, on one line")
    return key


def metadata_of(key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that show a key."""
    return (("authorization", f"Bearer {key}"),) if key else ()


NO_OWN_KEY = OwnKey()


@cache
def own_key(path: str) -> OwnKey:
    """Return the key of a file, one for all channels of this process; without a path, none."""
    return OwnKey(path) if path else NO_OWN_KEY
