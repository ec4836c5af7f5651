"""How much of the work is late, and which requests drop their deadlines so that few of them are late.

An overload makes some work late. The fewest requests are late if they are the longest ones (Moore and Hodgson 1968).
These drop their deadlines when they arrive: if they waited until they are late, they would delay others until then.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from scheduler.admission.shares import left_after

DEFERRED = "deferred"  # why a request dropped its deadlines, where it is not late itself
OVERLOAD_S = 10.0  # how long an overload lasts after a request had to wait that was not late
MIN_ARRIVALS, MAX_ARRIVALS = 32, 512  # among which the longest requests are found
FOUND_FOR_ARRIVALS, FOUND_FOR_S = 8, 1.0  # after which the longest requests are found again
DEFERRED_WEIGHT = 0.8  # of deferred work; less than 1, so that deferring ends with the overload
LIGHT_OVERLOAD, DEEP_OVERLOAD = 0.07, 0.12  # by the share of all work that is late


@dataclass(slots=True)
class _Lane:
    """The work of requests with about the same target, in seconds of an instance; old work counts less and less."""

    late_s: float = 0.0
    all_s: float = 0.0
    counted_s: float = -math.inf
    min_deferred_s: float = math.inf  # requests that take at least as long have together no more work than is late
    mean_s: float = 0.0
    found_s: float = -math.inf  # when `min_deferred_s` was found
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ARRIVALS))
    num_arrived: int = 0

    def decay(self, now_s: float) -> None:
        left = left_after(now_s - self.counted_s)
        self.late_s *= left
        self.all_s *= left
        self.counted_s = max(now_s, self.counted_s)

    def find_min_deferred(self) -> None:
        """Find the longest requests that together have no more work than is late."""
        self.found_s = self.counted_s
        total_s = sum(self.arrivals)
        self.mean_s, self.min_deferred_s = total_s / len(self.arrivals), math.inf
        if len(self.arrivals) < MIN_ARRIVALS or self.late_s <= 0:
            return
        left_s = total_s * self.late_s / self.all_s
        for work_s in sorted(self.arrivals, reverse=True):
            left_s -= work_s
            if left_s < 0:
                return
            self.min_deferred_s = work_s


class LateWork:
    """Counts the work of requests with deadlines by lane of the admission queue, and what part of it is late."""

    def __init__(self) -> None:
        """Start without any work."""
        self._lanes: dict[int, _Lane] = {}
        self._waited_s = -math.inf

    def arrived(self, lane: int, work_s: float, now_s: float, *, long: float) -> bool:
        """Count a request; return whether it is deferred: it drops its deadlines, so that others keep theirs.

        That is so where work was late recently, and the request takes at least `long` times the mean of its lane. In
        light overload, which mostly ends before such a request would be late, this limit is up to twice as high.
        """
        counts = self._lane(lane, now_s)
        counts.all_s += work_s
        counts.arrivals.append(work_s)
        counts.num_arrived += 1
        if counts.num_arrived % FOUND_FOR_ARRIVALS == 0 or now_s > counts.found_s + FOUND_FOR_S:
            counts.find_min_deferred()
        is_deferred = work_s >= counts.min_deferred_s and work_s >= (2.0 - self._depth(now_s)) * long * counts.mean_s
        if is_deferred:
            counts.late_s += DEFERRED_WEIGHT * work_s
        return is_deferred

    def became_late(self, lane: int, work_s: float, now_s: float) -> None:
        """Count a request that could not be served in time."""
        self._lane(lane, now_s).late_s += work_s

    def waits(self, now_s: float) -> None:
        """Note that a request has to wait that is not late yet."""
        self._waited_s = max(now_s, self._waited_s)

    def is_overload(self, now_s: float) -> bool:
        """Return whether a request waited recently."""
        return now_s - self._waited_s < OVERLOAD_S

    def _depth(self, now_s: float) -> float:
        """Return how deep the overload is, over all lanes: 0 where it is light, 1 where it is deep."""
        late_s = all_s = 0.0
        for counts in self._lanes.values():
            counts.decay(now_s)
            late_s += counts.late_s
            all_s += counts.all_s
        share = late_s / all_s if all_s > 0 else 0.0
        return min(1.0, max(0.0, (share - LIGHT_OVERLOAD) / (DEEP_OVERLOAD - LIGHT_OVERLOAD)))

    def _lane(self, lane: int, now_s: float) -> _Lane:
        counts = self._lanes.get(lane)
        if counts is None:
            counts = self._lanes[lane] = _Lane()
        counts.decay(now_s)
        return counts
