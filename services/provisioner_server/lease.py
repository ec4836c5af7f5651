"""Who may act: one provisioner at a time. On one machine a lock on a file says so, which ends with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol


class Lease(Protocol):
    """What at most one provisioner holds at a time."""

    async def held(self) -> bool:
        """Take or keep it; tell whether it is held now."""

    async def holder(self) -> str:
        """Name who holds it; nothing where nobody is known to."""

    async def release(self) -> None:
        """Let the next one have it."""


class FileLease:
    """A lock on a file; the kernel lets it go when its process ends, however that ends."""

    def __init__(self, path: Path, own_id: str) -> None:
        """Hold nothing yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._own_id = path, own_id
        self._handle: int | None = None

    async def held(self) -> bool:
        """Try to lock the file; a lock once taken stays."""
        if self._handle is not None:
            return True
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._own_id.encode(), 0)
        self._handle = handle
        return True

    async def holder(self) -> str:
        """Read who wrote its name there."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    async def release(self) -> None:
        """Unlock."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None
