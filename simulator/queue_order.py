"""Orders other than arrival in which requests of a simulated admission queue get their turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from predictor.step_time import StepTime
from predictor.tabulated_costs import step_seconds, tabulate
from scheduler.admission.order import fewest_late, late_last
from simulator.conditions import FEWEST_LATE, LATE_LAST, WHOLE_QUEUE_TURNS, Conditions
from simulator.fleet import InstanceSpec
from simulator.workload import Workload


class QueueOrder:
    """The order of the admission queue by the run's conditions."""

    def __init__(
        self, work: Workload, specs: Sequence[InstanceSpec], conditions: Conditions, num_schedulers: int
    ) -> None:
        """Estimate how long the cluster would be busy with each request, where the order needs it."""
        self.mean_step_s: Callable[[], float] = lambda: 0.0  # of all instances, as they report it
        self._turn, self._num_schedulers = conditions.admission_turn, num_schedulers
        self._due_s = (work.arrival_s + conditions.late_s).tolist()
        if conditions.admission_turn != FEWEST_LATE:
            return
        prompt_tokens = work.lengths.prompt_tokens
        tags = np.where(np.isnan(work.tag_median), work.lengths.output_tokens, work.tag_median)
        seats = sum(spec.config.max_num_seqs for spec in specs)
        room = sum(spec.config.num_gpu_blocks * spec.config.block_size for spec in specs)
        self._steps = (tags * np.maximum(1 / seats, (prompt_tokens + tags / 2) / room)).tolist()
        prompts, which = np.unique(prompt_tokens, return_inverse=True)
        self._prefill_s = (prefill_seconds(specs[0].step_time, prompts) / len(specs))[which].tolist()

    def order(self, waiting: Sequence[int], now_s: float) -> Sequence[int]:
        """Sort the waiting requests of an admission queue."""
        return self.in_turn(waiting, now_s, self.mean_step_s())

    def in_turn(self, waiting: Sequence[int], now_s: float, step_s: float) -> Sequence[int]:
        """Sort waiting requests, which are given by arrival; `step_s` is the mean duration of a step."""
        if len(waiting) < 2 or self._turn not in WHOLE_QUEUE_TURNS:
            return waiting
        if self._turn == LATE_LAST:
            return late_last(waiting, self._due_s.__getitem__, now_s)
        share_s = step_s * self._num_schedulers

        def takes_s(number: int) -> float:
            return float(self._steps[number] * share_s + self._prefill_s[number])

        return fewest_late(waiting, self._due_s.__getitem__, takes_s, now_s)


def prefill_seconds(step_time: StepTime, prompt_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return how much longer prompts of these lengths take than a step of one token."""
    costs = tabulate(step_time, int(prompt_tokens.max(initial=1)), 1)
    least_s = step_seconds(costs, 1, 1, 1, 1.0, 0, 0.0, 0.0)
    return np.array(
        [max(0.0, step_seconds(costs, int(n), 1, 0, 0.0, 1, float(n) ** 2, 0.0) - least_s) for n in prompt_tokens]
    )
