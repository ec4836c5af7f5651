"""The process that writes a state file, and whether it is still running."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from uuid import UUID

START_TIME_FIELD = 19  # of /proc/PID/stat, counted after the command's closing bracket


def boot_id() -> bytes:
    """Return sixteen bytes that identify the boot of the machine, and with it its monotonic clock."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()).bytes


def pid_namespace() -> int:
    """Return the number of this process's pid namespace, within which process ids are unique."""
    return Path("/proc/self/ns/pid").stat().st_ino


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None where it does not exist, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[START_TIME_FIELD - 1])


def lock_as_writer(descriptor: int) -> None:
    """Lock a file until this process ends: the kernel releases the lock then, however it ends."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(descriptor: int) -> bool:
    """Return whether a writer has locked the file; this works between containers too, unlike process ids."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked; or the file system has no locks, and then it counts as locked
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def has_ended(pid: int, ticks: int, namespace: int) -> bool:
    """Return whether the writing process is known to have ended, although a child of it may keep the lock."""
    if namespace != pid_namespace() or pid == os.getpid():
        return False
    return start_ticks(pid) != ticks
