"""The load of an engine as times by its profile, and the shortest target of the requests there."""

from __future__ import annotations

import numpy as np

from predictor.batching import ordered
from predictor.compiled import kernel, small_kernel
from predictor.state import NO_TRANSFER, State
from predictor.step_time import step_seconds

LOAD = ("decode_step_s", "queued_prefill_s", "least_tpot_slo_s")  # the indicators that `write` writes
# What is summed up over requests.
NUM_REQUESTS, CONTEXT, LONGEST, PREFILL_S, TPOT_S, NUM_SUMS = range(6)


@small_kernel
def clear(sums: np.ndarray) -> None:
    """Start to sum up."""
    sums[:] = 0.0
    sums[TPOT_S] = np.inf


@kernel
def add(state: State, slot: int, sums: np.ndarray) -> None:
    """Add a request that runs, waits or is reserved."""
    request = state.requests[slot]
    tokens = request.prompt_tokens + request.output_tokens
    sums[NUM_REQUESTS] += 1.0
    sums[CONTEXT] += tokens
    sums[LONGEST] = max(sums[LONGEST], float(tokens))
    left = tokens - request.computed_tokens
    if left > 1 and request.stage == NO_TRANSFER:
        token_s, sequence_s, _, _ = ordered.unit_costs_s(state)
        sums[PREFILL_S] += token_s * left + sequence_s + ordered.prefill_s(state, float(left), request.computed_tokens)
    tpot_s = state.facts[slot].tpot_slo_s
    sums[TPOT_S] = min(sums[TPOT_S], tpot_s)


@kernel
def write(state: State, sums: np.ndarray, load: np.ndarray) -> None:
    """Write the indicators, in the order of LOAD; of more requests than there are seats, the mean ones decode."""
    engine = state.engine[0]
    num = int(min(sums[NUM_REQUESTS], float(engine.max_num_seqs)))
    load[0] = 0.0
    if num > 0:
        context = num * (sums[CONTEXT] / sums[NUM_REQUESTS] + 1.0)
        load[0] = engine.pace * step_seconds(state.costs, num, num, num, context, 0, 0.0, 0.0, sums[LONGEST] + 1.0)
    load[1] = engine.pace * sums[PREFILL_S]
    load[2] = sums[TPOT_S]
