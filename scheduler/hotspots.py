"""Prefixes that so many share that the instances which cache them are about to be overloaded (LMetric §5.2)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from scheduler.candidates import RequestIndicators
from scheduler.indicators import Column


class Hotspots:
    """The two-phase detector, reported of each request once, in the order of time.

    M are the instances that hold the most of a request's prefix. First phase: the share x of the request's class among
    all requests of the window is such that x / (1 - x) > |M| / (number of the others), equation 2 broken. Second phase:
    since that holds, more than 2|M| requests of the class in a row scored lower on an instance in M than on all others.
    Then M is to be left out, until either phase's condition fails; which it will, as others get to cache the prefix.

    Only requests with a high hit ratio count as of a class; the table of classes is as long as a window has requests.
    """

    def __init__(self, *, window_s: float = 60.0, least_hit_ratio: float = 0.5) -> None:
        """Have seen nothing."""
        self.window_s = window_s
        self.least_hit_ratio = least_hit_ratio
        self._requests: deque[tuple[float, Hashable]] = deque()
        self._counts: Counter[Hashable] = Counter()
        self._in_a_row: dict[Hashable, int] = {}  # of classes for which the first phase holds

    def seen(
        self, request: RequestIndicators, hit_tokens: Column, scores: Column, now_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """Note a request; tell which instances it should not go to, None where it may go anywhere."""
        self._forget(now_s - self.window_s)
        prefix_class = request.prefix_class
        highest = 0.0 if prefix_class is None else _highest(hit_tokens)
        if highest == 0.0 or highest < self.least_hit_ratio * request.prompt_tokens:
            self._requests.append((now_s, None))
            return None
        self._requests.append((now_s, prefix_class))
        self._counts[prefix_class] += 1
        return self._hot(prefix_class, hit_tokens == highest, scores)

    def _hot(
        self, prefix_class: Hashable, holders: npt.NDArray[np.bool_], scores: Column
    ) -> npt.NDArray[np.bool_] | None:
        num_holders, num_of_class = int(np.count_nonzero(holders)), self._counts[prefix_class]
        num_others, num_rest = len(holders) - num_holders, len(self._requests) - num_of_class
        if num_of_class * num_others <= num_holders * num_rest or num_others == 0:
            self._in_a_row.pop(prefix_class, None)
            return None
        if not _least(scores, holders) < _least(scores, ~holders):
            self._in_a_row[prefix_class] = 0
            return None
        in_a_row = self._in_a_row[prefix_class] = self._in_a_row.get(prefix_class, 0) + 1
        return holders if in_a_row > 2 * num_holders else None

    def _forget(self, until_s: float) -> None:
        while self._requests and self._requests[0][0] <= until_s:
            gone = self._requests.popleft()[1]
            if gone is None:
                continue
            self._counts[gone] -= 1
            if self._counts[gone] == 0:
                del self._counts[gone]
                self._in_a_row.pop(gone, None)


def _highest(column: Column) -> float:
    """Give the highest value that is known, 0 where none is."""
    highest: float = column[column.argmax()] if len(column) else 0.0
    return highest if highest == highest else float(np.fmax.reduce(column, initial=0.0))  # noqa: PLR0124 - NaN


def _least(scores: Column, where: npt.NDArray[np.bool_]) -> float:
    least: float = np.fmin.reduce(scores[where])
    return least
