"""Detects prefixes that are shared by so many requests that the instances which cache them overload (LMetric §5.2)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from scheduler.candidates import RequestIndicators
from scheduler.columns import Column


class HotspotDetector:
    """The two-phase detector; it observes each request once, in the order of time.

    M is the set of instances that cache the longest part of a request's prefix. First phase: the share x of the
    request's class among all requests of the window violates equation 2: x / (1 - x) > |M| / (number of other
    instances). Second phase: since then, more than 2|M| consecutive requests of the class scored lower on an instance
    in M than on all others. From then on M is excluded, until the condition of either phase fails; it does when other
    instances cache the prefix.

    Only requests with a high hit ratio belong to a class; there are at most as many classes as requests in the window.
    """

    def __init__(self, *, window_s: float = 60.0, least_hit_ratio: float = 0.5) -> None:
        """Start with an empty window."""
        self.window_s = window_s
        self.least_hit_ratio = least_hit_ratio
        self._requests: deque[tuple[float, Hashable]] = deque()
        self._counts: Counter[Hashable] = Counter()
        self._in_a_row: dict[Hashable, int] = {}  # consecutive requests, by class in its second phase

    def observe(
        self, request: RequestIndicators, hit_tokens: Column, scores: Column, now_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """Count a request; return the instances to exclude for it, None if there are none."""
        self._forget(now_s - self.window_s)
        prefix_class = request.prefix_class
        highest = 0.0 if prefix_class is None else _highest(hit_tokens)
        if highest == 0.0 or highest < self.least_hit_ratio * request.prompt_tokens:
            self._requests.append((now_s, None))
            return None
        self._requests.append((now_s, prefix_class))
        self._counts[prefix_class] += 1
        return self._hotspots(prefix_class, hit_tokens == highest, scores)

    def _hotspots(
        self, prefix_class: Hashable, holders: npt.NDArray[np.bool_], scores: Column
    ) -> npt.NDArray[np.bool_] | None:
        num_holders, num_of_class = int(np.count_nonzero(holders)), self._counts[prefix_class]
        num_others, num_rest = len(holders) - num_holders, len(self._requests) - num_of_class
        if num_of_class * num_others <= num_holders * num_rest or num_others == 0:
            self._in_a_row.pop(prefix_class, None)
            return None
        if not _lowest(scores, holders) < _lowest(scores, ~holders):
            self._in_a_row[prefix_class] = 0
            return None
        in_a_row = self._in_a_row[prefix_class] = self._in_a_row.get(prefix_class, 0) + 1
        return holders if in_a_row > 2 * num_holders else None

    def _forget(self, until_s: float) -> None:
        while self._requests and self._requests[0][0] <= until_s:
            prefix_class = self._requests.popleft()[1]
            if prefix_class is None:
                continue
            self._counts[prefix_class] -= 1
            if self._counts[prefix_class] == 0:
                del self._counts[prefix_class]
                self._in_a_row.pop(prefix_class, None)


def _highest(column: Column) -> float:
    """Return the highest known value, 0 if none is known."""
    highest: float = column[column.argmax()] if len(column) else 0.0
    return highest if highest == highest else float(np.fmax.reduce(column, initial=0.0))  # noqa: PLR0124 - NaN


def _lowest(scores: Column, where: npt.NDArray[np.bool_]) -> float:
    lowest: float = np.fmin.reduce(scores[where])
    return lowest
