"""A rate that no placement can sustain, whatever it knows and in whichever order it serves.

A step costs at least so much for each answer token in it, for each prompt token and for each token of context that is
read, at prices that no step of the engine undercuts; a request's tokens then cost at least their price, wherever it is
served. The best such prices are those of a linear program. Contexts have a price beyond their reading where memory is
what binds: no more than fit are in a step together.
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
from simulator.fleet import Unit
from simulator.workload import Workload

SCALES = np.array([1e3, 1e4, 1e6])  # of the prices, so that the solver sees numbers near one


def sustained_rate(units: Sequence[Unit], work: Workload, rate: float) -> float:
    """Tell the rate at which instances that never idle are just done with all requests when the last one comes.

    The workload is one that was drawn at `rate`, and so is the result. A run of a finite trace may hold a little more:
    it begins with empty instances, and ends with full ones.
    """
    if any(unit != units[0] for unit in units):
        raise ValueError("bound: is known of equal instances only")
    if units[0].config.enable_prefix_caching:
        raise ValueError("bound: is not known where prompts are cached")
    seconds = least_seconds(units[0], work) / len(units)
    return rate * float(work.arrival_s[-1]) / seconds


def least_seconds(unit: Unit, work: Workload) -> float:
    """Tell how long one instance is busy at least with all requests."""
    prompts = work.lengths.prompt_tokens.astype(np.float64)
    decodes = work.lengths.output_tokens - 1.0  # the first token comes of the prompt
    contexts = decodes * prompts + decodes * (decodes + 1) / 2
    amounts = np.array([decodes.sum(), prompts.sum(), contexts.sum()])
    rows, costs = zip(*_steps(unit), strict=True)
    found = linprog(-amounts / SCALES, A_ub=np.array(rows) / SCALES, b_ub=np.array(costs))
    assert found.success, found.message
    return unit.pace * -float(found.fun)


def _steps(unit: Unit) -> Iterator[tuple[tuple[float, float, float], float]]:
    """Give the steps that matter, as (decodes, prompt tokens, contexts read) and least seconds.

    Between the knots of the step time and between none and all of the memory, costs run straight.
    """
    most, chunk = unit.config.max_num_seqs, unit.config.max_num_batched_tokens
    room = (unit.config.num_gpu_blocks - 1) * unit.config.block_size
    costs = tabulate(unit.step_time, chunk, most)
    once = costs.coefficients[CONSTANT] + costs.by_count[:, SAMPLED].min()
    knots = {int(edge) for x in unit.step_time.by_tokens.x for edge in (np.floor(x), np.ceil(x))} | {chunk}
    for decodes in range(min(most, chunk) + 1):
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
