"""An upper bound of the rate that any placement can sustain, whatever it knows and in whatever order it serves.

Give every response token, prompt token and token of context that is read a price in seconds, such that no step of the
engine takes less time than the prices of its tokens. A request then takes at least the sum of its tokens' prices,
wherever it is served. A linear program finds the prices with the largest sum. Where memory is the bottleneck, context
costs more than the time to read it, because only a limited number of tokens fits into a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import linprog

from predictor.step_time import (
    CONSTANT,
    DECODE_BASE,
    DECODE_SLOPE,
    MIXED_BASE,
    MIXED_SLOPE,
    PREFILL,
    PREFILL_TOKEN,
    SAMPLED,
    tabulate,
)
from simulator.fleet import InstanceSpec
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
    rows, costs = zip(*_steps(spec), strict=True)
    found = linprog(-amounts / SCALES, A_ub=np.array(rows) / SCALES, b_ub=np.array(costs))
    assert found.success, found.message
    return spec.pace * -float(found.fun)


def _steps(spec: InstanceSpec) -> Iterator[tuple[tuple[float, float, float], float]]:
    """Yield the steps that constrain the prices: (decodes, prompt tokens, context read) and minimum seconds.

    Between the knots of the step time, and between empty and full memory, costs are linear.
    """
    num_seqs, chunk = spec.config.max_num_seqs, spec.config.max_num_batched_tokens
    room = (spec.config.num_gpu_blocks - 1) * spec.config.block_size
    costs = tabulate(spec.step_time, chunk, num_seqs)
    once = costs.coefficients[CONSTANT] + costs.by_count[:, SAMPLED].min()
    knots = {int(edge) for x in spec.step_time.by_tokens.x for edge in (np.floor(x), np.ceil(x))} | {chunk}
    for decodes in range(min(num_seqs, chunk) + 1):
        prompts = {1, *(knot - decodes for knot in knots)}
        for tokens in sorted({0, *(one for one in prompts if 0 < one <= chunk - decodes)}):
            if decodes + tokens == 0:
                continue
            base, slope = (MIXED_BASE, MIXED_SLOPE) if tokens else (DECODE_BASE, DECODE_SLOPE)
            seconds = once + costs.by_tokens[decodes + tokens]
            if tokens:
                seconds += costs.coefficients[PREFILL] + costs.coefficients[PREFILL_TOKEN] * tokens
            per_context = 0.0
            if decodes:
                seconds += costs.by_count[decodes, base]
                per_context = costs.by_count[decodes, slope]
            yield (decodes, tokens, 0.0), float(seconds)
            if decodes:
                yield (decodes, tokens, float(room)), float(seconds + per_context * room)
