"""What of the machine can fail: a disk that is full, and the wall clocks of processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_BYTES = 1 << 30  # at most; it takes only the memory of what is written
SPARE_BYTES = 1 << 16
SHIMS = Path(__file__).parent / "shims"
FAKETIME = ("libfaketimeMT.so.1", "libfaketime.so.1")
MEMORY = Path("/dev/shm")  # noqa: S108 - where libfaketime shares memory
LIBRARIES = (Path("/usr/lib"), Path("/usr/local"))


class SmallDisk:
    """A file system in memory, whose size can be reduced to what is used; a plain folder without the right to mount."""

    def __init__(self, folder: Path) -> None:
        """Use a folder."""
        self.folder = folder
        self.why_not = "" if os.geteuid() == 0 else "mounting a file system needs root"

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Mount it while the block runs, where that is possible."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.why_not:
            self.why_not = _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder))
        try:
            yield
        finally:
            if not self.why_not:
                _run("umount", "--lazy", str(self.folder))

    def fill(self) -> str:
        """Leave no room; return why that is not possible, or nothing."""
        if self.why_not:
            return self.why_not
        status = os.statvfs(self.folder)
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        why = ""
        for spare in (0, SPARE_BYTES, 16 * SPARE_BYTES):  # something may be written meanwhile
            why = self._resize(used + spare)
            if not why:
                break
        return why

    def free(self) -> None:
        """Make room again."""
        self._resize(DISK_BYTES)

    def _resize(self, num_bytes: int) -> str:
        return _run("mount", "-o", f"remount,size={num_bytes}", str(self.folder))


class WallClocks:
    """The wall clock of each process, by libfaketime, where it is installed; monotonic clocks go on as they are."""

    def __init__(self, folder: Path) -> None:
        """Keep an offset for each process in a file of a folder."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = [path for name in FAKETIME for place in LIBRARIES for path in sorted(place.glob(f"*/faketime/{name}"))]
        self._library = found[0] if found else None
        self.why_not = "" if found else "libfaketime is not installed (Debian: libfaketime)"

    def environment(self, part: str) -> Mapping[str, str]:
        """Return the environment by which a process gets a clock of its own."""
        if self._library is None:
            return {}
        self.set(part, 0)
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SHIMS), os.environ.get("PYTHONPATH")))),
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._folder / part),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DISABLE_SHM": "1",  # a killed process would leave it locked
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, part: str, offset_s: int) -> None:
        """Move the clock of a process away from the machine's, from the next second on."""
        fresh = self._folder / f"{part}.new"
        fresh.write_text(f"{offset_s:+d}\n", encoding="ascii")
        fresh.rename(self._folder / part)


def remove_left_clocks() -> None:
    """Remove the shared memory that libfaketime leaves where a process was killed."""
    for path in MEMORY.glob("*faketime_s*_*"):
        pid = path.name.rpartition("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _run(*command: str) -> str:
    """Run a command; return why it failed, or nothing."""
    with suppress(FileNotFoundError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else (done.stderr.strip() or f"{command[0]} failed")
    return f"{command[0]} is not installed"
