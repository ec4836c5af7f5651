"""What of the machine fails: its disk and its clocks, where that is possible."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.chaos.machine import SmallDisk, WallClocks, remove_left_clocks

NOW = "import time; print(time.time(), time.monotonic())"


def test_a_full_disk_refuses_writes_until_it_is_free(tmp_path: Path) -> None:
    """What was written before stays."""
    disk = SmallDisk(tmp_path / "disk")
    with disk.mounted():
        if disk.why_not:
            pytest.skip(disk.why_not)
        kept = disk.folder / "kept"
        kept.write_bytes(bytes(1 << 20))
        assert disk.fill() == ""
        with pytest.raises(OSError, match="No space left") as refused:
            (disk.folder / "more").write_bytes(bytes(1 << 21))
        assert refused.value.errno == errno.ENOSPC
        disk.free()
        (disk.folder / "more").write_bytes(bytes(1 << 21))
        assert kept.stat().st_size == 1 << 20
    assert not os.path.ismount(disk.folder)


def test_a_disk_that_cannot_be_mounted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a plain folder then."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    disk = SmallDisk(tmp_path / "disk")
    with disk.mounted():
        assert disk.fill() == "mounting a file system needs root"
        (disk.folder / "file").write_bytes(b"here")


def test_a_clock_jumps_for_one_process_alone(tmp_path: Path) -> None:
    """Its wall clock does; its monotonic clock is the machine's."""
    clocks = WallClocks(tmp_path)
    if clocks.why_not:
        pytest.skip(clocks.why_not)

    def times_of(part: str, offset_s: int) -> tuple[float, float]:
        environment = {**os.environ, **clocks.environment(part)}
        clocks.set(part, offset_s)
        done = subprocess.run([sys.executable, "-c", NOW], env=environment, capture_output=True, text=True, check=True)
        wall, monotonic = map(float, done.stdout.split())
        return wall - time.time(), monotonic - time.monotonic()

    for offset_s in (3600, -3600, 0):
        wall, monotonic = times_of("one", offset_s)
        assert wall == pytest.approx(offset_s, abs=60)
        assert monotonic == pytest.approx(0, abs=60)


def test_processes_with_a_clock_of_their_own_can_sleep(tmp_path: Path) -> None:
    """Sidecars do, while an engine writes its state."""
    clocks = WallClocks(tmp_path)
    if clocks.why_not:
        pytest.skip(clocks.why_not)
    environment = {**os.environ, **clocks.environment("one")}
    program = "import time; start_s = time.monotonic(); time.sleep(0.01); print(time.monotonic() - start_s)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.01


def test_what_killed_processes_leave_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to a process that runs stays."""
    monkeypatch.setattr("scripts.chaos.machine.MEMORY", tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = {f"faketime_shm_{os.getpid()}", "faketime_shm_other", "psm_1"}
    for name in (f"faketime_shm_{gone.pid}", f"sem.faketime_sem_{gone.pid}", *kept):
        (tmp_path / name).touch()
    remove_left_clocks()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_without_the_library_no_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes then run as they are."""
    monkeypatch.setattr("scripts.chaos.machine.LIBRARIES", (tmp_path,))
    clocks = WallClocks(tmp_path)
    assert "not installed" in clocks.why_not
    assert clocks.environment("one") == {}
