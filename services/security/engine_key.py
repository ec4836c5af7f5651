"""The API key that engines get, from a file that is read again when it changes; it is never logged."""

from __future__ import annotations

import logging
import time

from services.logs import log_event
from services.watched_file import WatchedFile
from simulator.codec import read_text

log = logging.getLogger(__name__)

CHECK_S = 1.0
MAX_CHARACTERS = 4096


class EngineKey:
    """A file with one key."""

    def __init__(self, path: str) -> None:
        """Read it; ValueError where it holds no key."""
        self._file = WatchedFile(path, _header_from)
        self._checked_s = time.monotonic()
        header = self._file.read_if_changed()
        assert header is not None
        self._header = header

    def header(self) -> bytes:
        """Return the header line of requests to engines; while the file cannot be used, the last key stays."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            try:
                self._header = self._file.read_if_changed() or self._header
            except ValueError as error:
                log_event(log, logging.ERROR, "API key of engines changed, and cannot be used", reason=error)
        return self._header


def _header_from(path: str) -> bytes:
    key = read_text(path).strip()
    if not key or len(key) > MAX_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"engine_api_key_file: {path} must hold one API key")
    return b"authorization: Bearer " + key.encode() + b"\r\n"
