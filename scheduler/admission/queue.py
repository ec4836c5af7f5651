"""The admission queue: requests that a policy's `hold` condition keeps at the scheduler until an instance admits them.

In an engine's queue a request may see later requests start sooner elsewhere, and it starts by preempting others; at
the scheduler it waits for whichever instance can take it first. Time is an argument here, and requests are numbers
that grow with their arrival.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Rows
from scheduler.indicators import Column

RETRY_S = 0.05  # mean pause between two attempts of the first request, at first
ASK_AGAIN_S = 0.1  # until an instance that did not admit a request is asked again, if no request has finished there

Order = Callable[[Sequence[int], float], Sequence[int]]  # the numbers of waiting requests, by turn, at a time


@dataclass(slots=True)
class AdmissionQueue:
    """The requests of one model that wait at one scheduler, first come, first served unless `order` says otherwise.

    No request waits beyond its deadline, and when more than `max_held` wait, the oldest leaves without admission.
    """

    max_held: int = sys.maxsize
    order: Order | None = None
    _numbers: list[int] = field(default_factory=list)  # by arrival
    _deadlines_s: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._numbers)

    @property
    def numbers(self) -> list[int]:
        """The waiting requests, by arrival."""
        return self._numbers.copy()

    @property
    def oldest(self) -> int:
        """The waiting request that arrived first."""
        return self._numbers[0]

    def head(self, now_s: float) -> int:
        """Return the request whose turn it is."""
        if self.order is None or len(self._numbers) < 2:
            return self._numbers[0]
        return self.order(self._numbers, now_s)[0]

    def join(self, number: int, deadline_s: float = math.inf) -> None:
        """Add a request that waits until its deadline at the latest."""
        bisect.insort(self._numbers, number)
        self._deadlines_s[number] = deadline_s

    def leave(self, number: int) -> None:
        """Remove a request."""
        del self._numbers[self._position(number)], self._deadlines_s[number]

    def must_leave(self, number: int, now_s: float) -> bool:
        """Return whether a request goes now, whether or not an instance admits it."""
        return self._deadlines_s[number] <= now_s or self._position(number) < len(self._numbers) - self.max_held

    def deadline_s(self, number: int) -> float:
        """Return when a request leaves at the latest."""
        return self._deadlines_s[number]

    def _position(self, number: int) -> int:
        return bisect.bisect_left(self._numbers, number)


class RecentRefusals:
    """Remembers which instances did not admit a request, so that they are asked again only when something changed."""

    def __init__(self, num_instances: int, ask_again_s: float = ASK_AGAIN_S) -> None:
        """Start without a refusal."""
        self._ask_again_s = ask_again_s
        self._num_finished = np.zeros(num_instances)  # when they were asked
        self._refused_s = np.full(num_instances, -np.inf)

    def worth_asking(self, num_finished: Column, now_s: float, rows: Rows | None = None) -> npt.NDArray[np.bool_]:
        """Return which instances admitted the last request, finished one since, or refused long enough ago."""
        chosen = slice(None) if rows is None else rows
        finished = num_finished > self._num_finished[chosen]
        return finished | (now_s - self._refused_s[chosen] >= self._ask_again_s)

    def note(self, refused: npt.NDArray[np.bool_], num_finished: Column, now_s: float, rows: Rows | None) -> None:
        """Record which instances refused, and how many requests had finished there."""
        chosen = slice(None) if rows is None else rows
        self._num_finished[chosen] = num_finished
        self._refused_s[chosen] = np.where(refused, now_s, -np.inf)


def retry_pause_s(waited_s: float, random: float) -> float:
    """Return the pause before the next attempt, by how long the first request has waited and a number from 0 to 1.

    Schedulers do not know of each other's requests. With equal pauses one of them would always be the first to see a
    free instance; and the longer its first request has waited, the sooner it tries again, down to a quarter.
    """
    return RETRY_S * (0.5 + random) / min(1.0 + waited_s, 4.0)
