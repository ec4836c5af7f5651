"""Who writes a state file, and whether that process still lives."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from uuid import UUID

START_TIME_FIELD = 19  # of /proc/PID/stat, counted behind the command's closing bracket


def boot_id() -> bytes:
    """Sixteen bytes that change when the machine starts, and with it its monotonic clock."""
    return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()).bytes


def pid_namespace() -> int:
    """Tell apart the containers within which a process id means something."""
    return Path("/proc/self/ns/pid").stat().st_ino


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is no such process, or it is but a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[START_TIME_FIELD - 1])


def lock_as_writer(descriptor: int) -> None:
    """Hold a file until this process ends, however it ends: the kernel lets go of the lock then."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(descriptor: int) -> bool:
    """Tell whether a writer holds the file; works between containers too, where process ids mean nothing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # somebody holds it; or nobody can, there being no locks, and then nothing speaks against it
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def has_ended(pid: int, ticks: int, namespace: int) -> bool:
    """Tell whether that very process is known to have ended, though a child of it may still hold the file."""
    if namespace != pid_namespace() or pid == os.getpid():
        return False
    return start_ticks(pid) != ticks
