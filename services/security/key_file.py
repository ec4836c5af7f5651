"""The file of accepted keys: read at the start, and again when it changes."""

from __future__ import annotations

import asyncio
import logging
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from services.logs import log_event
from services.security.access_metrics import AccessMetrics
from services.security.keys import ApiKeys, keys_from, tenant_weights_from
from services.watched_file import WatchedFile
from simulator.codec import read_text

log = logging.getLogger(__name__)

Content = TypeVar("Content")

POLL_S = 1.0  # between two looks at the file
KEY_HINT = (
    "write a table [[key]] with name and sha256 for each key, as `block keys new NAME` prints it; `block keys hash` "
    "gives the sha256 of a key that you have"
)


class KeyFile:
    """The keys of a file. An invalid change is refused, and the keys before it stay."""

    def __init__(self, path: str, metrics: AccessMetrics | None = None) -> None:
        """Read the file; ValueError where it is invalid."""
        self.problem = ""  # of the last version of the file
        self._metrics = metrics
        self._file = WatchedFile(path, keys_from_file)
        keys = self._file.read_if_changed()
        assert keys is not None, "the first look reads"
        self.keys: ApiKeys = keys
        self._set_problem("")
        warn_if_readable(path)

    async def follow(self, every_s: float = POLL_S) -> None:
        """Take changes of the file until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            await self.look()

    async def look(self) -> None:
        """Take a change of the file, if there is one."""
        path = self._file.path
        try:
            keys = await self._file.poll()
        except ValueError as error:
            if str(error) != self.problem:
                log_event(log, logging.ERROR, "API keys are invalid, keeping the last ones", reason=str(error))
            self._set_problem(str(error))
            return
        if keys is not None:
            self.keys = keys
            self._set_problem("")
            log_event(log, logging.INFO, "API keys changed", num=len(keys), file=path)
            warn_if_readable(path)

    def _set_problem(self, problem: str) -> None:
        self.problem = problem
        if self._metrics is not None:
            self._metrics.valid.set(0 if problem else 1)


def keys_from_file(path: str) -> ApiKeys:
    """Read a key file; errors start with the setting and its path, and show no key."""
    return keys_in(read_text(path), f"api_key_file: {path}")


def keys_in(text: str, source: str) -> ApiKeys:
    """Read the text of a key file; errors start with its source."""
    return _read(text, source, keys_from, KEY_HINT)


def tenant_weights_from_file(path: str) -> dict[str, float]:
    """Read the weights of tenants in a key file, or in a file with tables [[tenant]] alone; errors start with it."""
    return _read(
        read_text(path), f"tenants: {path}", tenant_weights_from, "write a table [[tenant]] with name and weight"
    )


def _read(text: str, source: str, read: Callable[[Any], Content], hint: str) -> Content:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):  # whose message may have a part of a key
        raise ValueError(f"{source}: is not TOML: {hint}") from None
    try:
        return read(document)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def warn_if_readable(path: str) -> None:
    """Log a warning where users other than the owner and the group may read a file."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return
    if mode & stat.S_IROTH:
        log_event(
            log, logging.WARNING, "API keys can be read by other users", file=path, mode=f"{stat.S_IMODE(mode):04o}"
        )
