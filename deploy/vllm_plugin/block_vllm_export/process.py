"""The process that writes a state file, and whether it has ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from uuid import UUID

START_TIME_FIELD = 19  # of /proc/PID/stat, counted after the closing bracket of the command


def boot_id() -> bytes:
    """Return sixteen bytes that change when the machine, and with it the monotonic clock, restarts."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()).bytes


def pid_namespace() -> int:
    """Return the number of the container within which a process id is valid."""
    return Path("/proc/self/ns/pid").stat().st_ino


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None for one that does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[START_TIME_FIELD - 1])


def lock_as_writer(descriptor: int) -> None:
    """Lock a file until this process ends; the kernel releases the lock however it ends."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(descriptor: int) -> bool:
    """Return whether a writer locks the file; this works between containers too, where process ids do not."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked, or the file system has no locks, and then it may be
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def has_ended(pid: int, ticks: int, namespace: int) -> bool:
    """Return whether a process is known to have ended, although a child of it may still lock the file."""
    if namespace != pid_namespace() or pid == os.getpid():
        return False
    return start_ticks(pid) != ticks
