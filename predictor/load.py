"""The load of an engine as times by its profile, and the shortest target that a request there can still attain."""

from __future__ import annotations

import numpy as np

from predictor import steps
from predictor.batching import ordered_requests
from predictor.compiled import kernel, small_kernel
from predictor.state import NO_TRANSFER, State
from predictor.step_time import DECODE_REGION, PREFILL_REGION
from predictor.tabulated_costs import step_seconds

LOAD = ("decode_step_s", "queued_prefill_s", "least_tpot_slo_s")  # the indicators that `shown` returns
NONE_YET = (0.0, 0.0, 0.0, 0.0, np.inf)  # requests, their context, the longest one, seconds of prefill, shortest target

Sums = tuple[float, float, float, float, float]


@kernel
def added(state: State, slot: int, sums: Sums) -> Sums:
    """Add a request that runs, waits or is reserved."""
    num, context, longest, prefill_s, tpot_s = sums
    request = state.requests[slot]
    tokens = float(request.prompt_tokens + request.output_tokens)
    left = tokens - request.computed_tokens
    if left > 1 and request.stage == NO_TRANSFER:
        token_s, sequence_s, _, _ = ordered_requests.unit_costs_s(state)
        prefill_s += token_s * left + sequence_s + ordered_requests.prefill_s(state, left, request.computed_tokens)
    if not is_missed(state, slot):
        target_s = state.facts[slot].tpot_slo_s
        tpot_s = min(tpot_s, target_s)  # in this order: NaN is no target
    return num + 1.0, context + tokens, max(longest, tokens), prefill_s, tpot_s


@small_kernel
def is_missed(state: State, slot: int) -> bool:
    """Return whether a request has missed a deadline, or its next token is late already."""
    request = state.requests[slot]
    if 0 <= request.tokens_on_time < request.output_tokens:
        return True
    return steps.due_s(state, slot, request.output_tokens + 1) < state.engine[0].now_s  # NaN without a deadline


@small_kernel
def shown(state: State, sums: Sums) -> tuple[float, float, float]:
    """Return the indicators, in the order of LOAD; of more requests than there are seats, so many mean ones decode."""
    all_requests, all_context, longest, prefill_s, tpot_s = sums
    engine = state.engine[0]
    num = int(min(all_requests, float(engine.max_num_seqs)))
    step_s = 0.0
    if num > 0:
        context = num * (all_context / all_requests + 1.0)
        pace = engine.pace * engine.region_pace[DECODE_REGION]
        step_s = pace * step_seconds(state.costs, num, num, num, context, 0, 0.0, 0.0, longest + 1.0)
    return step_s, engine.pace * engine.region_pace[PREFILL_REGION] * prefill_s, tpot_s
