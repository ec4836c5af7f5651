"""Requests that are held at a scheduler until an instance admits them, by the condition `hold` of a policy.

In an engine's queue a request may find that later ones elsewhere began sooner, and it begins by preempting others; at
the scheduler it waits for whichever instance can take it first. Time is an argument here, and who waits is a number.
"""

from __future__ import annotations

import bisect
import math
import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Places
from scheduler.indicators import Column

RETRY_S = 0.05  # between two looks at the instances, while anybody waits, on average, at first
AGAIN_S = 0.1  # until an instance that admitted nobody is asked again, if nothing has ended there


@dataclass(slots=True)
class Queue:
    """Who is held at one scheduler: first come, first served.

    Nobody waits longer than it may, and when there are too many, the first goes as it is.
    """

    most: int = sys.maxsize
    _numbers: list[int] = field(default_factory=list)  # by arrival
    _until_s: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._numbers)

    @property
    def numbers(self) -> list[int]:
        """Who waits, in the order of arrival."""
        return self._numbers.copy()

    @property
    def first(self) -> int:
        """Whose turn it is."""
        return self._numbers[0]

    def join(self, number: int, until_s: float = math.inf) -> None:
        """Wait, until then at the latest; numbers are given by arrival."""
        bisect.insort(self._numbers, number)
        self._until_s[number] = until_s

    def leave(self, number: int) -> None:
        """Wait no more."""
        del self._numbers[self._place(number)], self._until_s[number]

    def has_to_go(self, number: int, now_s: float) -> bool:
        """Tell whether one goes now, whether or not an instance admits it."""
        return self._until_s[number] <= now_s or self._place(number) < len(self._numbers) - self.most

    def must_go(self, now_s: float) -> list[int]:
        """Find all who do, in the order of arrival."""
        return [number for number in self._numbers if self.has_to_go(number, now_s)]

    def _place(self, number: int) -> int:
        return bisect.bisect_left(self._numbers, number)


class Refusals:
    """Which instances admitted nobody when they were last asked: they are asked again when there is reason to."""

    def __init__(self, num_instances: int, again_s: float = AGAIN_S) -> None:
        """Know of none."""
        self._again_s = again_s
        self._num_finished = np.zeros(num_instances)  # when they were asked
        self._then_s = np.full(num_instances, -np.inf)  # when they refused

    def worth_asking(self, num_finished: Column, now_s: float, places: Places | None = None) -> npt.NDArray[np.bool_]:
        """Tell who admitted the last request, or has had one end since, or said no long enough ago."""
        chosen = slice(None) if places is None else places
        ended = num_finished > self._num_finished[chosen]
        return ended | (now_s - self._then_s[chosen] >= self._again_s)

    def note(self, refused: npt.NDArray[np.bool_], num_finished: Column, now_s: float, places: Places | None) -> None:
        """Take in what was said, and how many had ended there."""
        chosen = slice(None) if places is None else places
        self._num_finished[chosen] = num_finished
        self._then_s[chosen] = np.where(refused, now_s, -np.inf)


def pause_s(waited_s: float, chance: float) -> float:
    """Tell for how long to wait until the next look, by how long the first has waited and a number drawn from 0 to 1.

    Of several schedulers none knows of the others' requests. Were pauses always as long, one would always be the first
    to see what has become free; and the longer its first has waited, the sooner one looks again, down to a fourth.
    """
    return RETRY_S * (0.5 + chance) / min(1.0 + waited_s, 4.0)
