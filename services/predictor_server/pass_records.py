"""The last steps of a rank by their start, so that other ranks find the slowest one of each pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

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
