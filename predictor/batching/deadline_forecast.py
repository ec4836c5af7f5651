"""On-time requests first, and who cannot be on time is given up where that costs least gain.

A forecast from the estimated step times, the predicted lengths and the targets says what each prefill would bring and
cost: its gain is the weight of the tokens that can still be on time, its cost the engine time until its end, and the
share of the KV blocks that it will hold for as long. Where not all prefills can be on time, those with the lowest gain
per cost are removed (Moore-Hodgson with weights); they are served with what is left.
"""

from __future__ import annotations

import numpy as np

from predictor import blocks, steps
from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel, small_kernel
from predictor.state import NONE, RUNNING, State

ETA, FIRST_TOKEN_WEIGHT, FROM_FIRST_TOKEN, AGE_LIMIT, AGE_SHARE = range(5)  # the options
DECODE, ON_TIME, AHEAD, LATE = range(4)
MIN_FREE_PARTS = 10  # decodes wait only while more than 1/10 of the blocks is free, since they hold theirs longer
AHEAD_TARGETS = 3  # a decode that is due after this many TPOT targets can wait
STEP_CONSTANTS = 5  # a step should last this many times the constant part of its time
USUAL_SHARE = 0.75  # of the shortest TPOT target: how long steps are where their constant part is large
LEAST_RATE = 0.05  # of prefills, in seconds of them per second
LEAST_GAIN = 1e-3
LONGER = 1 / 8  # a response longer than predicted is expected to go on for this part of the prediction


@kernel
def schedule(state: State) -> bool:
    """Fill the step: decodes by due time, then prefills.

    Where the constant part of a step is large, steps are longer, and decodes that are far ahead come after the prefills
    that can be on time, unless blocks are short.
    """
    engine = state.engine[0]
    count = ordered_requests.list_with_costs(state, engine.options[FROM_FIRST_TOKEN] > 0)
    tpot_s, start_s = ordered_requests.shortest_tpot_s(state, count), ordered_requests.start_s(state)
    least_s = ordered_requests.limit_s(state, count, engine.options[ETA])
    long_s = max(least_s, min(tpot_s, STEP_CONSTANTS * ordered_requests.constant_s(state)))
    can_wait = long_s > least_s and engine.num_free_blocks * MIN_FREE_PARTS > engine.num_blocks
    first_s, busy_s = np.inf, ordered_requests.constant_s(state)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        if not ordered_requests.is_decode(state, slot):
            rank.group = ON_TIME
            continue
        rank.group, rank.key = DECODE, rank.due_s
        if can_wait and AHEAD_TARGETS * tpot_s <= rank.due_s - start_s < np.inf:
            rank.group = AHEAD
            continue
        busy_s += rank.cost_s
        if rank.due_s >= start_s:
            first_s = min(first_s, rank.due_s - start_s)
    limit_s = max(least_s, min(first_s, long_s))
    rate, step_s = 1.0, busy_s
    if least_s < np.inf:
        step_s = max(least_s, min(long_s, USUAL_SHARE * tpot_s))
        rate = max(LEAST_RATE, 1 - busy_s / step_s)
    for place in range(count):
        slot = state.turns[place]
        if state.ranks[slot].group == ON_TIME:
            forecast(state, slot, start_s, rate, step_s)
    select(state, count, start_s, rate)
    serve_aged(state, count, start_s)
    return ordered.fill(state, count, engine.max_num_batched_tokens, max(least_s, tpot_s), limit_s)


@small_kernel
def tokens_to_come(state: State, slot: int) -> int:
    """Return the predicted number of tokens until a response ends."""
    expected = state.requests[slot].expected_tokens
    return max(expected - ordered_requests.num_produced(state, slot), int(expected * LONGER) + 1)


@kernel
def forecast(state: State, slot: int, start_s: float, rate: float, step_s: float) -> None:
    """Set a prefill's key, its cost per gain if it starts now, and its group.

    `rate` is the part of the time that prefills get, `step_s` how long a step takes. The tokens that are due before the
    prefill can end are lost; where the first token is late, so is its own weight.
    """
    engine, facts, rank = state.engine[0], state.facts[slot], state.ranks[slot]
    tokens = float(tokens_to_come(state, slot))
    context = steps.tokens_of(state, slot) + tokens / 2
    decodes_s = tokens * ordered_requests.decode_cost_s(state, context)
    held_s = tokens * step_s * context / (engine.num_blocks * engine.block_size)
    late_s = start_s + rank.cost_s / rate - rank.due_s
    gain = tokens
    if late_s > 0:
        rank.group = LATE
        if facts.tpot_slo_s > 0:
            gain -= late_s / facts.tpot_slo_s
    elif ordered_requests.num_produced(state, slot) == 0:
        gain += engine.options[FIRST_TOKEN_WEIGHT]
    rank.key = (rank.cost_s + decodes_s + held_s) / (facts.weight * max(gain, LEAST_GAIN))


@kernel
def select(state: State, count: int, start_s: float, rate: float) -> None:
    """Remove prefills until all others can be on time one after the other, and order these by due time.

    Where they need more seats or blocks than are free, they are served by gain per cost.
    """
    num = sort_on_time(state, count)
    end_s = start_s
    for place in range(num):
        slot = state.turns[place]
        end_s += state.ranks[slot].cost_s / rate
        while end_s > state.ranks[slot].due_s and state.ranks[slot].group == ON_TIME:
            worst = slot
            for back in range(1, place + 1):
                other = state.turns[place - back]
                if state.ranks[other].group == ON_TIME and state.ranks[other].key > state.ranks[worst].key:
                    worst = other
            state.ranks[worst].group = LATE
            end_s -= state.ranks[worst].cost_s / rate
    if has_space(state, num):
        for place in range(num):
            rank = state.ranks[state.turns[place]]
            if rank.group == ON_TIME:
                rank.key = rank.due_s


@kernel
def sort_on_time(state: State, count: int) -> int:
    """Move the requests that can be on time to the front of the list, by due time; return their number."""
    num = 0
    for place in range(count):
        slot = state.turns[place]
        if state.ranks[slot].group == ON_TIME:
            state.turns[place] = state.turns[num]
            position = num
            while position > 0 and is_due_before(state, slot, state.turns[position - 1]):
                state.turns[position] = state.turns[position - 1]
                position -= 1
            state.turns[position] = slot
            num += 1
    return num


@small_kernel
def is_due_before(state: State, slot: int, other: int) -> bool:
    """Order by due time, then arrival, then as the engine breaks ties."""
    if state.ranks[slot].due_s != state.ranks[other].due_s:
        return state.ranks[slot].due_s < state.ranks[other].due_s
    return is_older(state, slot, other)


@small_kernel
def is_older(state: State, slot: int, other: int) -> bool:
    """Order by arrival, then as the engine breaks ties."""
    one, two = state.requests[slot], state.requests[other]
    if one.arrival_s != two.arrival_s:
        return one.arrival_s < two.arrival_s
    return one.tie_break < two.tie_break


@kernel
def has_space(state: State, num: int) -> bool:
    """Return whether seats and blocks are free for all waiting requests that can be on time."""
    engine = state.engine[0]
    seats, num_blocks = engine.max_num_seqs - engine.num_running, engine.num_free_blocks
    for place in range(num):
        slot = state.turns[place]
        if state.ranks[slot].group == ON_TIME and state.requests[slot].status != RUNNING:
            seats -= 1
            num_blocks -= blocks.blocks_for(steps.tokens_of(state, slot), engine.block_size)
    return bool(seats >= 0 and num_blocks >= 0)


@kernel
def serve_aged(state: State, count: int, start_s: float) -> None:
    """Put the oldest request that waits too long for its first token before all other prefills.

    This is done for a share of the time only: under overload more requests become too old than can be served.
    """
    options = state.engine[0].options
    if options[AGE_LIMIT] == 0:
        return
    oldest = NONE
    for place in range(count):
        slot = state.turns[place]
        ttft_s, waited_s = state.facts[slot].ttft_slo_s, start_s - state.requests[slot].arrival_s
        if ordered_requests.num_produced(state, slot) > 0:
            continue
        is_its_turn = start_s % ttft_s < options[AGE_SHARE] * ttft_s
        is_aged = is_its_turn and waited_s > options[AGE_LIMIT] * ttft_s
        if is_aged and (oldest == NONE or is_older(state, slot, oldest)):
            oldest = slot
    if oldest != NONE:
        state.ranks[oldest].group, state.ranks[oldest].key = ON_TIME, -np.inf
