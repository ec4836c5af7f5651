"""Orders other than arrival in which requests of an admission queue get their turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def late_last(waiting: Sequence[int], due_s: Callable[[int], float], now_s: float) -> list[int]:
    """Order by arrival; requests that are late already come last, as they would make all others late too."""
    return sorted(waiting, key=lambda number: (due_s(number) < now_s, number))


def fewest_late(
    waiting: Sequence[int], due_s: Callable[[int], float], takes_s: Callable[[int], float], now_s: float
) -> list[int]:
    """Order so that as few requests as possible are late, though these may be very late (Moore and Hodgson 1968).

    In order of arrival, whenever a request would be late, the one that takes longest among it and those before it goes
    to the end. `takes_s` is how long the whole cluster would be busy with a request.
    """
    in_time: list[int] = []
    longest: list[tuple[float, int]] = []  # a heap
    last: set[int] = set()
    busy_until_s = now_s
    for number in sorted(waiting):
        if due_s(number) < now_s:
            last.add(number)
            continue
        in_time.append(number)
        duration_s = takes_s(number)
        busy_until_s += duration_s
        heapq.heappush(longest, (-duration_s, number))
        if busy_until_s > due_s(number):
            minus_s, deferred = heapq.heappop(longest)
            busy_until_s += minus_s
            last.add(deferred)
    return [number for number in in_time if number not in last] + sorted(last)
