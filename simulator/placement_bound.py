"""An upper bound of the rate that any placement can sustain, whatever it knows and in whatever order it serves.

Give every response token, prompt token and token of context that is read a price in seconds, such that no step of the
engine takes less time than the prices of its tokens. A request then takes at least the sum of its tokens' prices,
wherever it is served. A linear program finds the prices with the largest sum. Where memory is the bottleneck, context
costs more than the time to read it, because only a limited number of tokens fits into a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from simulator.fleet import InstanceSpec
from simulator.step_shapes import step_shapes
from simulator.workload import Workload

SCALES = np.array([1e3, 1e4, 1e6])  # of the prices, so that the solver works with numbers near one


def sustained_rate(specs: Sequence[InstanceSpec], work: Workload, rate: float) -> float:
    """Return the rate at which instances that never idle have just served all requests when the last one arrives.

    The workload must be drawn at `rate`. A run of a finite trace may sustain a little more, because it starts with
    empty instances and ends with full ones.
    """
    if any(spec != specs[0] for spec in specs):
        raise ValueError("bound: is defined for equal instances only")
    if specs[0].config.enable_prefix_caching:
        raise ValueError("bound: is not defined with prefix caching")
    seconds = min_busy_s(specs[0], work) / len(specs)
    return rate * float(work.arrival_s[-1]) / seconds


def min_busy_s(spec: InstanceSpec, work: Workload) -> float:
    """Return the minimum time for which one instance is busy with all requests."""
    prompts = work.lengths.prompt_tokens.astype(np.float64)
    decodes = work.lengths.output_tokens - 1.0  # the prompt's step produces the first token
    contexts = decodes * prompts + decodes * (decodes + 1) / 2
    amounts = np.array([decodes.sum(), prompts.sum(), contexts.sum()])
    steps = step_shapes(spec)
    rows = np.stack([steps.decodes, steps.prompt_tokens, steps.context_tokens], axis=1)
    found = linprog(-amounts / SCALES, A_ub=rows / SCALES, b_ub=steps.seconds)
    assert found.success, found.message
    return -float(found.fun)
