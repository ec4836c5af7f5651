"""The events of a simulated cluster besides arrivals, in the order of their times."""

from __future__ import annotations

import heapq
import math
from typing import Any

# The kinds of events, in the order in which they are processed at one moment.
BACK, OUT, TICK, REPORT, WAKE, SAMPLE, CALL = range(7)


class EventQueue:
    """The events to come; those of one kind and moment are in the order in which they were scheduled."""

    def __init__(self) -> None:
        """Start without events."""
        self._events: list[tuple[float, int, int, Any]] = []
        self._num_scheduled = 0

    def schedule(self, time_s: float, kind: int, what: Any = None) -> None:
        """Schedule an event."""
        self._num_scheduled += 1
        heapq.heappush(self._events, (time_s, kind, self._num_scheduled, what))

    @property
    def next_s(self) -> float:
        """When the next event is; infinity without one."""
        return self._events[0][0] if self._events else math.inf

    @property
    def next_kind(self) -> int | None:
        """The kind of the next event."""
        return self._events[0][1] if self._events else None

    def take(self) -> tuple[float, int, Any]:
        """Remove the next event; return its time, its kind, and what it is about."""
        time_s, kind, _, what = heapq.heappop(self._events)
        return time_s, kind, what
