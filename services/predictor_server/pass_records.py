"""The last steps of ranks by their start: in lockstep, the slowest one of each pass determines how long all take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from predictor.data_parallel import DataParallelRank

MAX_RECORDS = 512
WITHIN = 0.5  # of the step's time, by which starts of one pass differ at most


class RecordedStep(NamedTuple):
    """A step that has ended: its start and its seconds, those by the profile, and the region of its batch."""

    start_s: float
    real_s: float
    predicted_s: float
    region: int


class PassRecords:
    """The last steps of one rank, in the order of their starts."""

    def __init__(self) -> None:
        """Know no step yet."""
        self._steps: list[RecordedStep] = []

    def __len__(self) -> int:
        """Return how many steps are known."""
        return len(self._steps)

    def add(self, step: RecordedStep) -> None:
        """Add a step, which starts after all others; one of an engine that has restarted replaces them."""
        if self._steps and step.start_s < self._steps[-1].start_s:
            self._steps.clear()
        self._steps.append(step)
        if len(self._steps) >= 2 * MAX_RECORDS:
            del self._steps[:MAX_RECORDS]

    def in_pass_of(self, step: RecordedStep) -> RecordedStep | None:
        """Return the step that was in the same pass as one of another rank."""
        place = bisect_left(self._steps, step.start_s, key=lambda one: one.start_s)
        near = self._steps[max(0, place - 1) : place + 1]
        found = min(near, key=lambda one: abs(one.start_s - step.start_s), default=None)
        return found if found is not None and abs(found.start_s - step.start_s) < WITHIN * step.real_s else None


def slowest_of(step: RecordedStep, others: Iterable[PassRecords]) -> RecordedStep:
    """Return the step that takes longest by the profile among those in one pass: it determines how long all take."""
    found = (records.in_pass_of(step) for records in others)
    return max([step, *(one for one in found if one is not None)], key=lambda one: one.predicted_s)


class RankSteps:
    """Which data-parallel rank an engine is, if any, and its steps among those of the ranks in lockstep with it."""

    def __init__(self) -> None:
        """Know no rank yet."""
        self.rank: DataParallelRank | None = None
        self.passes = PassRecords()
        self.beside: Callable[[], Sequence[PassRecords]] = tuple  # of the other ranks in lockstep
        self._unmatched: list[RecordedStep] = []

    @property
    def is_in_lockstep(self) -> bool:
        """Return whether the engine steps together with other ranks."""
        return self.rank is not None and self.rank.lockstep is not None

    @property
    def knows_all_ranks(self) -> bool:
        """Return whether the steps of all ranks are known that determine those of the engine."""
        return not self.is_in_lockstep or self.rank is None or len(self.beside()) + 1 >= self.rank.size

    def restart(self) -> None:
        """Forget the steps of a process that has ended."""
        self._unmatched = []

    def slowest(self, steps: list[RecordedStep]) -> list[RecordedStep]:
        """Return the steps to compare with their predictions; in lockstep, the slowest ones of earlier passes."""
        if not self.is_in_lockstep:
            return steps
        for step in steps:
            self.passes.add(step)
        # by the next time, the other ranks' steps of the same passes have been read
        slowest, self._unmatched = [slowest_of(one, self.beside()) for one in self._unmatched], steps
        return slowest
