"""In which other orders than that of arrival requests that are held at a scheduler could get their turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from predictor.step_time import StepTime, step_seconds, tabulate


def late_last(waiting: Sequence[int], due_s: Callable[[int], float], now_s: float) -> list[int]:
    """Go by arrival; those that are late already come after all others, whom they would make late too."""
    return sorted(waiting, key=lambda number: (due_s(number) < now_s, number))


def fewest_late(
    waiting: Sequence[int], due_s: Callable[[int], float], takes_s: Callable[[int], float], now_s: float
) -> list[int]:
    """Have as few requests late as can be (Moore and Hodgson 1968), though these may be very late.

    In the order of arrival, whenever one would be late, the one that takes longest of those before it, or itself, goes
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
        took_s = takes_s(number)
        busy_until_s += took_s
        heapq.heappush(longest, (-took_s, number))
        if busy_until_s > due_s(number):
            minus_s, put_off = heapq.heappop(longest)
            busy_until_s += minus_s
            last.add(put_off)
    return [number for number in in_time if number not in last] + sorted(last)


def prefill_seconds(step_time: StepTime, prompt_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How much longer than a step of one token steps take in sum for prompts of these lengths."""
    costs = tabulate(step_time, int(prompt_tokens.max(initial=1)), 1)
    least_s = step_seconds(costs, 1, 1, 1, 1.0, 0, 0.0, 0.0)
    return np.array(
        [max(0.0, step_seconds(costs, int(n), 1, 0, 0.0, 1, float(n) ** 2, 0.0) - least_s) for n in prompt_tokens]
    )
