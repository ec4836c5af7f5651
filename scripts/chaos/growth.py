"""Memory and open files of processes over time, and whether they grow."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

from services.cluster.child import Child

EVERY_S, SERIES_S = 5.0, 60.0
MEBIBYTE = 2**20
MAX_GROWTH = 0.02  # of the resident memory, over the last two thirds of the time
MAX_MORE_FILES = 16.0  # over the same time
MIN_JUDGED_S = 1500.0  # memory of a shorter run is reported, and not judged: processes are still warming up
MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSize:
    """The size of a process at a moment."""

    at_s: float
    pid: int
    resident_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedGrowth:
    """How a process grew over the last two thirds of the time, by a line through its sizes."""

    part: str
    for_s: float
    resident_bytes: float  # at the start
    memory_ratio: float  # growth over its size at the start
    more_files: float


@dataclass(slots=True, kw_only=True)
class GrowthWatch:
    """Follows the sizes of processes."""

    sizes: dict[str, list[ProcessSize]] = field(default_factory=dict)
    start_s: float = field(default_factory=time.monotonic)

    async def run(self, children: Mapping[str, Child], done: asyncio.Event) -> None:
        """Note the size of every process now and then."""
        self.start_s = time.monotonic()
        while not done.is_set():
            for name, child in children.items():
                if child.serves:
                    with suppress(OSError, IndexError):
                        self.sizes.setdefault(name, []).append(size_of(child.pid))
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), EVERY_S)

    @property
    def resident_bytes(self) -> int:
        """The memory of all processes, by their last sizes."""
        return sum(sizes[-1].resident_bytes for sizes in self.sizes.values() if sizes)

    def series(self) -> dict[str, list[tuple[int, int, float, int]]]:
        """Return sizes about once a minute: seconds from the start, process id, MiB and open files."""
        return {
            part: [
                (round(one.at_s - self.start_s), one.pid, round(one.resident_bytes / MEBIBYTE, 1), one.num_files)
                for one in sizes[:: round(SERIES_S / EVERY_S)]
            ]
            for part, sizes in self.sizes.items()
        }

    def fitted(self) -> list[FittedGrowth]:
        """Fit the growth of every process that has lived through the last two thirds of the time."""
        end_s = max((sizes[-1].at_s for sizes in self.sizes.values()), default=self.start_s)
        from_s = self.start_s + (end_s - self.start_s) / 3
        found = []
        for part, sizes in self.sizes.items():
            late = [size for size in sizes if size.at_s >= from_s]
            if len(late) >= MIN_SAMPLES and {size.pid for size in sizes} == {late[0].pid}:
                found.append(fitted_growth(part, late))
        return found


def size_of(pid: int) -> ProcessSize:
    """Return the present size of a process."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text(encoding="ascii").split()[1])
    return ProcessSize(
        at_s=time.monotonic(),
        pid=pid,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        num_files=sum(1 for _ in (process / "fd").iterdir()),
    )


def fitted_growth(part: str, sizes: Sequence[ProcessSize]) -> FittedGrowth:
    """Fit a line to the sizes of one process."""
    for_s = sizes[-1].at_s - sizes[0].at_s

    def line(value: Callable[[ProcessSize], float]) -> tuple[float, float]:
        fit = linear_regression([size.at_s - sizes[0].at_s for size in sizes], [value(size) for size in sizes])
        return fit.intercept, fit.slope * for_s

    at_start, growth = line(lambda size: size.resident_bytes)
    _, more_files = line(lambda size: size.num_files)
    return FittedGrowth(
        part=part, for_s=for_s, resident_bytes=at_start, memory_ratio=growth / at_start, more_files=more_files
    )


def growth_problems(found: Sequence[FittedGrowth], run_s: float) -> list[str]:
    """Return which processes grow; a run that is too short is judged by open files alone."""
    problems = [
        f"{one.part}: {one.more_files:+.0f} open files in {one.for_s:.0f} s"
        for one in found
        if one.more_files > MAX_MORE_FILES
    ]
    if run_s >= MIN_JUDGED_S:
        problems += [
            f"{one.part}: memory grew by {one.memory_ratio:.1%} in {one.for_s:.0f} s"
            for one in found
            if one.memory_ratio > MAX_GROWTH
        ]
    return problems
