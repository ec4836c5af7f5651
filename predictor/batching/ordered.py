"""Steps filled in an order over all requests, within seconds as well as tokens, seats and KV blocks.

A rule lists all requests with `ordered_requests.list_requests` or `list_with_costs`, gives each a rank (`state.RANK`),
and calls `fill`, which plans the step in that order and then carries it out in the order of vLLM's own loop:
preemptions, running requests, admissions. So a plan can also be carried out by a real vLLM. Memory is managed as in
vLLM v1 (prefix hits, preemption by recompute).
"""

from __future__ import annotations

import numpy as np
from numba.core import types

from predictor import blocks, estimator, queues, steps
from predictor.batching import vllm_v1
from predictor.batching.ordered_requests import (
    LEFT_OUT_S,
    awaits_output,
    goes_before,
    is_decode,
    limit_s,
    make_heap,
    pop,
)
from predictor.compiled import kernel, small_kernel
from predictor.kernel_addresses import by_address
from predictor.state import RUNNING, State
from predictor.state_allocation import state_type
from predictor.tabulated_costs import Costs, step_seconds


@kernel
def fill(state: State, count: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float) -> bool:
    """Fill the step with the `count` listed requests in the order of their ranks.

    A request gets its decode, or the largest chunk of its prefill with which the step stays within `num_tokens` tokens
    and the limit in seconds for requests of its kind; the step ends at the first that gets less than the whole. The
    first one gets a token at least. Where blocks are short the last running request in the order is preempted;
    admissions end in a step that preempts, and at the first request that does not fit. A running request that is left
    out keeps its blocks. Returns whether the next step will decode all running requests, if none ends or arrives.
    """
    return bool(_call_fill_behind(0, state, count, 0, num_tokens, decode_limit_s, prefill_limit_s))


@kernel
def fill_behind_decodes(state: State, count: int, num_tokens: int, prefill_limit_s: float) -> bool:
    """Fill the step as `fill` does where all decodes come first, without a limit in seconds; they need no order."""
    num_decodes = num_blocks = 0
    place = 0
    while place < count - num_decodes:
        slot = state.turns[place]
        if not is_decode(state, slot):
            place += 1
            continue
        num_decodes += 1
        num_blocks += not blocks.has_room(state, slot, state.requests[slot].computed_tokens + 1)
        state.turns[place] = state.turns[count - num_decodes]
        state.turns[count - num_decodes] = slot
    if num_decodes > num_tokens or num_blocks > state.engine[0].num_free_blocks:
        num_decodes = 0
    return bool(_call_fill_behind(0, state, count, num_decodes, num_tokens, np.inf, prefill_limit_s))


@kernel
def fill_behind(
    state: State, count: int, num_first: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float
) -> bool:
    """Fill the step as `fill` does; the last `num_first` of the list are decodes that fit, and come first."""
    engine = state.engine[0]
    steps.clear_sums(state.steps[steps.current(state)])
    if can_decode_all(state, num_tokens, decode_limit_s):
        engine.steady_limit_s = decode_limit_s
        return decode_all(state) and estimator.is_constant(engine)
    num_free_blocks = engine.num_free_blocks
    add_decodes(state, count, num_first)
    plan(state, count - num_first, num_first, num_tokens - num_first, decode_limit_s, prefill_limit_s)
    engine.num_free_blocks = num_free_blocks
    if not engine.plans_only:
        carry_out(state)
    engine.steady_limit_s = decode_limit_s
    return will_decode_all(state, num_tokens) and estimator.is_constant(engine)


_call_fill_behind = by_address(
    "ordered_fill", [fill_behind], types.boolean,
    lambda: (state_type(), types.int64, types.int64, types.int64, types.float64, types.float64),
)  # fmt: skip


@kernel
def add_decodes(state: State, count: int, num_first: int) -> None:
    """Add the last `num_first` of the list to the step, which are decodes that fit."""
    for place in range(count - num_first, count):
        slot = state.turns[place]
        before = state.requests[slot].computed_tokens
        state.engine[0].num_free_blocks -= not blocks.has_room(state, slot, before + 1)
        add(state, slot, before, 1)


@kernel
def plan(
    state: State, count: int, num_seen: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float
) -> None:
    """Choose the step's requests, their tokens, and the ones to preempt; queues and blocks stay as they are.

    `num_seen` running requests are in the step already.
    """
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    num_running, num_free_blocks = engine.num_running, engine.num_free_blocks
    threshold = engine.long_prefill_token_threshold if num_running + engine.num_waiting > 1 else 0
    make_heap(state, count)
    admits = True
    while count > 0 and num_tokens > 0:
        joins = admits and step.num_preempted == 0 and engine.num_running < engine.max_num_seqs
        if not joins and num_seen == engine.num_running:
            break
        slot = pop(state, count)
        count -= 1
        runs = state.requests[slot].status == RUNNING
        num_seen += runs
        if (runs and state.ranks[slot].cost_s == LEFT_OUT_S) or (not runs and not joins):
            continue
        num_hits = 0 if runs else blocks.find_hits(state, slot)
        before = state.requests[slot].computed_tokens
        if not runs:
            before = queues.computed_before(state, slot, num_hits * engine.block_size)
        wanted = steps.tokens_of(state, slot) - before
        most = min(wanted, num_tokens)
        if 0 < threshold < most:
            most = threshold
        seconds = decode_limit_s if is_decode(state, slot) else prefill_limit_s
        chunk = largest_chunk(state, before, wanted, most, seconds)
        if chunk == 0:
            if step.num_scheduled > 0:
                break
            chunk = 1
        held = state.requests[slot].num_blocks
        if runs:
            if not make_room(state, slot, before + chunk):
                continue
        else:
            admits = vllm_v1.fits(state, slot, num_hits, before + chunk)
            if not admits:
                continue
            held = num_hits - blocks.count_idle(state, slot, num_hits)
            state.running[engine.num_running] = slot  # until the end of the plan
            engine.num_running += 1
            num_seen += 1
        engine.num_free_blocks -= max(0, blocks.blocks_for(before + chunk, engine.block_size) - held)
        add(state, slot, before, chunk)
        num_tokens -= chunk
        if chunk < most:
            break
    engine.num_running, engine.num_free_blocks = num_running, num_free_blocks


@kernel
def carry_out(state: State) -> None:
    """Carry out the plan in vLLM's order: preemptions, running requests, admissions.

    An admission finds its prefix hits again, because the blocks taken and filled before it have changed the cache. It
    gets no more tokens than were planned, and admissions end where one that keeps blocks free finds too few of them.
    """
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    num_planned, num_preempted = step.num_scheduled, step.num_preempted
    step.num_scheduled = step.num_preempted = 0
    for victim in range(num_preempted):
        position = 0
        while state.running[position] != state.preempted[victim]:
            position += 1
        queues.preempt(state, position)
    num_admitted = 0
    for place in range(num_planned):
        entry = state.batch[index, place]
        slot, num_tokens = entry.slot, entry.tokens
        if state.requests[slot].status == RUNNING:
            vllm_v1.give_blocks(state, slot, state.requests[slot].computed_tokens + num_tokens)
            steps.assign(state, slot, num_tokens)
        else:
            state.turns[num_admitted] = slot
            state.ranks[slot].group = num_tokens  # no order is needed any more; the batch is overwritten below
            num_admitted += 1
    for place in range(num_admitted):
        slot = state.turns[place]
        num_hits = blocks.find_hits(state, slot)
        before = queues.computed_before(state, slot, num_hits * engine.block_size)
        num_tokens = min(state.ranks[slot].group, steps.tokens_of(state, slot) - before)
        if not vllm_v1.fits(state, slot, num_hits, before + num_tokens):
            break
        queues.admit(state, waiting_position(state, slot), before)
        blocks.adopt_hits(state, slot, num_hits)
        vllm_v1.give_blocks(state, slot, before + num_tokens)
        steps.assign(state, slot, num_tokens)


@kernel
def will_decode_all(state: State, num_tokens: int) -> bool:
    """Return whether all running requests are in the planned step and decode from the next one on, and none joins."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    n = engine.num_running
    if step.num_preempted > 0 or step.num_scheduled < n or n > num_tokens:
        return False
    if engine.num_waiting > 0 and n < engine.max_num_seqs:
        return False
    for place in range(n):
        entry = state.batch[index, place]
        if not vllm_v1.goes_on_decoding(state, entry.slot, state.requests[entry.slot].computed_tokens + entry.tokens):
            return False
    return True


@kernel
def fill_seconds(state: State, count: int, share: float) -> bool:
    """Fill the step up to this share of the shortest TPOT target; 0: without a limit in seconds."""
    seconds = limit_s(state, count, share)
    return fill(state, count, state.engine[0].max_num_batched_tokens, seconds, seconds)


@kernel
def fill_tokens(state: State, count: int, num_tokens: float) -> bool:
    """Fill the step without a limit in seconds, up to `num_tokens` tokens; 0: the engine's limit alone."""
    return fill(state, count, token_limit(state, num_tokens), np.inf, np.inf)


@small_kernel
def token_limit(state: State, num_tokens: float) -> int:
    """Return a rule's limit of tokens in a step; for 0 it is the engine's."""
    most = state.engine[0].max_num_batched_tokens
    return min(most, int(num_tokens)) if num_tokens > 0 else most


@kernel
def can_decode_all(state: State, num_tokens: int, decode_limit_s: float) -> bool:
    """Return whether no request can join and a decode of every running one fits, so that their order has no effect."""
    engine = state.engine[0]
    n = engine.num_running
    if n == 0 or n > num_tokens or (engine.num_waiting > 0 and n < engine.max_num_seqs):
        return False
    num_blocks = context = longest = 0
    for position in range(n):
        slot = state.running[position]
        if not is_decode(state, slot) or (engine.pipeline_depth > 1 and awaits_output(state, slot)):
            return False
        tokens = state.requests[slot].computed_tokens + 1
        num_blocks += not blocks.has_room(state, slot, tokens)
        context += tokens
        longest = max(longest, tokens)
    if num_blocks > engine.num_free_blocks:
        return False
    return engine.belief * step_seconds(state.costs, n, n, n, context, 0, 0.0, 0.0, longest) <= decode_limit_s


@kernel
def decode_all(state: State) -> bool:
    """Add a decode of every running request; return whether all of them go on decoding."""
    steady = True
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        tokens = state.requests[slot].computed_tokens + 1
        if not state.engine[0].plans_only:
            vllm_v1.give_blocks(state, slot, tokens)
        steady = steady and vllm_v1.goes_on_decoding(state, slot, tokens)
        add(state, slot, tokens - 1, 1)
    return steady


@small_kernel
def add(state: State, slot: int, before: int, num_tokens: int) -> None:
    """Add tokens of a request, behind `before` others, to the step and to the sums that its duration depends on."""
    index = steps.current(state)
    step = state.steps[index]
    steps.assign(state, slot, num_tokens)
    entry = state.batch[index, step.num_scheduled - 1]
    entry.sampled = before + num_tokens >= steps.tokens_of(state, slot)
    steps.add_to_sums(step, entry, before)


@small_kernel
def largest_chunk(state: State, before: int, wanted: int, most: int, seconds: float) -> int:
    """Return how many of a request's `wanted` tokens, at most `most`, fit into the step; 0 where none does."""
    if seconds == np.inf:
        return most
    step = state.steps[steps.current(state)]
    return int(_largest_chunk(state.costs, step, state.engine[0].belief, before, wanted, most, seconds))


@small_kernel
def fits_in_time(state: State, before: int, wanted: int, num_tokens: int, seconds: float) -> bool:
    """Return whether the step ends within its limit with `num_tokens` more tokens of a request."""
    step = state.steps[steps.current(state)]
    return bool(_fits_in_time(state.costs, step, state.engine[0].belief, before, wanted, num_tokens, seconds))


# These have few arguments: a call with the whole state takes longer than the search.


@kernel
def _largest_chunk(
    costs: Costs, step: np.record, belief: float, before: int, wanted: int, most: int, seconds: float
) -> int:
    """Search the largest chunk.

    A step is assumed to take longer with more tokens of a prefill. A single token is computed as a decode, which can
    be faster or slower.
    """
    if _fits_in_time(costs, step, belief, before, wanted, most, seconds):
        return most
    if most > 2 and _fits_in_time(costs, step, belief, before, wanted, 2, seconds):
        chunk, too_many = 2, most
        while too_many - chunk > 1:
            middle = (chunk + too_many) // 2
            if _fits_in_time(costs, step, belief, before, wanted, middle, seconds):
                chunk = middle
            else:
                too_many = middle
        return chunk
    return 1 if most > 1 and _fits_in_time(costs, step, belief, before, wanted, 1, seconds) else 0


@kernel
def _fits_in_time(
    costs: Costs, step: np.record, belief: float, before: int, wanted: int, num_tokens: int, seconds: float
) -> bool:
    num_decodes, num_prefills = step.num_decodes, step.num_prefills
    context, longest = step.decode_context, step.decode_longest
    prefill_qq, prefill_qkv = step.prefill_qq, step.prefill_qkv
    if num_tokens == 1:
        num_decodes += 1
        context += before + 1
        longest = max(longest, before + 1)
    else:
        num_prefills += 1
        prefill_qq += float(num_tokens) * num_tokens
        prefill_qkv += float(num_tokens) * before
    took_s = belief * step_seconds(
        costs, step.num_tokens + num_tokens, step.num_sampled + (num_tokens == wanted), num_decodes, context,
        num_prefills, prefill_qq, prefill_qkv, longest,
    )  # fmt: skip
    return took_s <= seconds


@small_kernel
def make_room(state: State, slot: int, num_tokens: int) -> bool:
    """Choose the last running requests in the order to be preempted until blocks suffice for `num_tokens` tokens.

    Returns False where too few requests come after this one; those in the step already come before it.
    """
    return blocks.has_room(state, slot, num_tokens) or bool(_make_room(state, slot, num_tokens))


@kernel
def _make_room(state: State, slot: int, num_tokens: int) -> bool:
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    while blocks.blocks_for(num_tokens, engine.block_size) - state.requests[slot].num_blocks > engine.num_free_blocks:
        last = slot
        for position in range(engine.num_running):
            other = state.running[position]
            if state.ranks[other].cost_s != LEFT_OUT_S and goes_before(state, last, other):
                last = other
        if last == slot:
            return False
        state.ranks[last].cost_s = LEFT_OUT_S
        state.preempted[step.num_preempted] = last
        step.num_preempted += 1
        engine.num_free_blocks += blocks.count_own(state, last)
    return True


@kernel
def waiting_position(state: State, slot: int) -> int:
    """Return the position of a request in the waiting queue."""
    position = 0
    while queues.waiting_at(state, position) != slot:
        position += 1
    return position
