"""In which other orders than that of arrival requests that are held at a scheduler could get their turn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from predictor.step_time import StepTime, step_seconds, tabulate
from simulator.conditions import FEWEST_LATE, FIRST_COME, LATE_LAST, Conditions
from simulator.fleet import Unit
from simulator.workload import Workload


class QueueOrder:
    """Whose turn it is when, by the run's conditions."""

    def __init__(self, work: Workload, units: Sequence[Unit], conditions: Conditions, num_schedulers: int) -> None:
        """Reckon how long the cluster would be busy with each request, where that matters."""
        self._turn, self._num_schedulers = conditions.turn, num_schedulers
        self._due_s = (work.arrival_s + conditions.late_s).tolist()
        if conditions.turn != FEWEST_LATE:
            return
        prompt_tokens = work.lengths.prompt_tokens
        tags = np.where(np.isnan(work.tag_median), work.lengths.output_tokens, work.tag_median)
        seats = sum(unit.config.max_num_seqs for unit in units)
        room = sum(unit.config.num_gpu_blocks * unit.config.block_size for unit in units)
        self._steps = (tags * np.maximum(1 / seats, (prompt_tokens + tags / 2) / room)).tolist()
        prompts, which = np.unique(prompt_tokens, return_inverse=True)
        self._prefill_s = (prefill_seconds(units[0].step_time, prompts) / len(units))[which].tolist()

    def in_turn(self, waiting: list[int], now_s: float, step_s: float) -> list[int]:
        """Sort those that wait, who are given by arrival; a step takes the instances so long on average."""
        if len(waiting) < 2 or self._turn == FIRST_COME:
            return waiting
        if self._turn == LATE_LAST:
            return late_last(waiting, self._due_s.__getitem__, now_s)
        share_s = step_s * self._num_schedulers

        def takes_s(number: int) -> float:
            return float(self._steps[number] * share_s + self._prefill_s[number])

        return fewest_late(waiting, self._due_s.__getitem__, takes_s, now_s)


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
