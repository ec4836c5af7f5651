"""A settings file that is read again when it changes, while a server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class WatchedFile(Generic[T]):
    """A file, read when its time, its size or its inode changes."""

    def __init__(self, path: str, read: Callable[[str], T]) -> None:
        """Read nothing yet."""
        self.path = path
        self._read = read
        self._seen: tuple[int, int, int] | None = None

    async def poll(self) -> T | None:
        """Read the file if it changed, None where it did not; a bad one is an error once."""
        return await asyncio.to_thread(self.read_if_changed)

    def read_if_changed(self) -> T | None:
        """Do the same, and block meanwhile."""
        try:
            status = Path(self.path).stat()
        except OSError as error:
            self._seen = None
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from None
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == self._seen:
            return None
        self._seen = seen
        return self._read(self.path)
