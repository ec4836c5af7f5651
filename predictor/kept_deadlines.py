"""Whether an engine certainly keeps all deadlines, without a simulation of the steps until then."""

from __future__ import annotations

import numpy as np

from predictor import blocks, steps
from predictor.batching import ordered_requests
from predictor.compiled import kernel, small_kernel
from predictor.repeated_steps import decode_pace
from predictor.state import PLAIN_LAYOUT, State
from predictor.tabulated_costs import ALONE, CONSTANT, DECODE_WAIT, KNOTS, NUM_KNOTS, SAMPLED, Costs, context_seconds


@kernel
def keeps_all(state: State) -> bool:
    """Return whether the steady decode steps certainly go on to the end without a preemption or a missed deadline.

    That is so if the KV blocks of all complete responses fit, and if a step as long as any to come is within each TPOT
    target. A deadline is kept with `min_slack_s` to spare. Requests that have missed one count no more.
    """
    engine = state.engine[0]
    if engine.num_waiting + engine.num_pending + engine.num_transfers > 0 or engine.kv_layout != PLAIN_LAYOUT:
        return False
    if engine.steady_limit_s < np.inf:
        return False
    longest_rest = 0
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        if request.output_tokens == 0:
            return False
        longest_rest = max(longest_rest, request.final_tokens - request.output_tokens)
    if _blocks_needed_at_end(state) > engine.num_free_blocks - engine.decode_reserve:
        return False
    start_s = ordered_requests.start_s(state)
    step_s = _longest_step_s(state, longest_rest)
    longest_rest = 0  # of requests that such a step could make late
    for position in range(engine.num_running):
        slot = state.running[position]
        if not _keeps_with(state, slot, start_s, step_s):
            request = state.requests[slot]
            longest_rest = max(longest_rest, request.final_tokens - request.output_tokens)
    if longest_rest == 0:
        return True
    until_end_s = _longest_step_s(state, longest_rest)
    for position in range(engine.num_running):
        slot = state.running[position]
        if not _keeps_with(state, slot, start_s, step_s) and not _keeps_with(state, slot, start_s, until_end_s):
            return False
    return True


@small_kernel
def _keeps_with(state: State, slot: int, start_s: float, step_s: float) -> bool:
    """Return whether a request gets all tokens by their deadlines, if the next steps take at most `step_s` each."""
    request, tpot_s = state.requests[slot], state.facts[slot].tpot_slo_s
    if request.tokens_on_time < 0 or request.tokens_on_time < request.output_tokens or np.isnan(tpot_s):
        return True  # it has no deadline to miss
    due_s = steps.due_s(state, slot, request.output_tokens + 1)
    return step_s <= tpot_s and start_s + step_s + state.engine[0].min_slack_s <= due_s


@kernel
def _blocks_needed_at_end(state: State) -> int:
    """Return the number of blocks that the running requests take until their responses end."""
    engine = state.engine[0]
    needed = 0
    for position in range(engine.num_running):
        request = state.requests[state.running[position]]
        tokens = request.computed_tokens + request.final_tokens - request.output_tokens
        needed += max(0, blocks.blocks_for(tokens, engine.block_size) - request.num_blocks)
    return needed


@kernel
def _longest_step_s(state: State, num_steps: int) -> float:
    """Return how long any of the next steps takes at most, which decode the running requests or some of them."""
    n = state.engine[0].num_running
    context = longest = 0
    for position in range(n):
        request = state.requests[state.running[position]]
        tokens = request.computed_tokens + min(num_steps, request.final_tokens - request.output_tokens)
        context += tokens
        longest = max(longest, tokens)
    by_tokens = sampled = attention = 0.0
    for num in range(1, n + 1):  # fewer sequences may take longer
        by_tokens = max(by_tokens, state.costs.by_tokens[num])
        sampled = max(sampled, state.costs.by_count[num, SAMPLED])
        attention = max(attention, _longest_attention_s(state.costs, num, min(context / num, longest), longest))
    return decode_pace(state) * (state.costs.coefficients[CONSTANT] + by_tokens + sampled + attention)


@small_kernel
def _longest_attention_s(costs: Costs, num_decodes: int, mean: float, longest: float) -> float:
    """Return how long attention takes at most where contexts have a mean and a maximum up to these."""
    share = costs.by_count[num_decodes, DECODE_WAIT]
    seconds = _most_between_knots_s(costs, num_decodes, mean)
    if share > 0:
        seconds += share * (_most_between_knots_s(costs, num_decodes, longest) - seconds)
    return seconds


@small_kernel
def _most_between_knots_s(costs: Costs, num_decodes: int, most: float) -> float:
    """Return the longest attention of decodes of equal contexts up to a length: at the end, or at a knot before."""
    seconds = context_seconds(costs, num_decodes, num_decodes * most, 0.0, ALONE, DECODE_WAIT)
    for knot in range(int(costs.coefficients[NUM_KNOTS])):
        context = costs.coefficients[KNOTS + knot]
        if context < most:
            at_knot_s = context_seconds(costs, num_decodes, num_decodes * context, 0.0, ALONE, DECODE_WAIT)
            seconds = max(seconds, at_knot_s)
    return seconds
