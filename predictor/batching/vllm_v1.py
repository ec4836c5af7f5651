"""vLLM v1 (0.28 to 0.33): running requests first, then waiting ones, within one token budget; preemption by recompute.

Mirrors `Scheduler.schedule` and `KVCacheManager.allocate_slots`, with and without speculation; where versions differ,
`vllm_versions` says how. A step with draft tokens never repeats itself, so an engine with speculation
is never steady.
"""

from __future__ import annotations

import numpy as np

from predictor import adapters, blocks, encoder_inputs, queues, remote_kv, steps
from predictor.compiled import kernel, small_kernel
from predictor.state import FETCH_FAILED, FETCHED, TO_FETCH, WAITING, State

PREEMPTED_ITSELF, NO_VICTIM = -1, -2  # returned in place of a position in the running list


@kernel
def schedule(state: State) -> bool:
    """Fill the step; return whether the next one will decode all running requests, if none ends or arrives."""
    engine = state.engine[0]
    threshold = long_prefill_limit(state)
    engine.encoder_tokens_left = engine.max_encoder_tokens
    budget, steady = schedule_running(state, engine.max_num_batched_tokens, threshold)
    if state.steps[steps.current(state)].num_preempted > 0:
        return False
    if engine.max_loras > 0:
        adapters.note_scheduled(state)
    return schedule_waiting(state, budget, threshold) and steady and engine.num_speculative_tokens == 0


@small_kernel
def long_prefill_limit(state: State) -> int:
    """Return how many tokens a request gets at most in this step; 0: no limit."""
    engine = state.engine[0]
    num_requests = engine.num_running + engine.num_waiting
    if engine.long_prefill_token_threshold == 0 or (engine.spares_lone_prefill and num_requests <= 1):
        return 0
    if engine.adaptive_threshold:
        return max(engine.long_prefill_token_threshold, engine.max_num_batched_tokens // max(1, num_requests))
    return engine.long_prefill_token_threshold


@kernel
def schedule_running(state: State, budget: int, threshold: int) -> tuple[int, bool]:
    """Schedule the running requests; return the remaining budget, and whether all decode from the next step on."""
    engine = state.engine[0]
    slots = engine.draft_slots
    index = steps.current(state)
    has_simple = has_simple_decodes(engine)
    steady = True
    position = 0
    while position < engine.num_running and budget > slots:
        slot = state.running[position]
        request = state.requests[slot]
        if is_ending(state, slot):
            position += 1
            continue
        if has_simple and is_simple_decode(state, slot):
            steady = steady and goes_on_decoding(state, slot, request.computed_tokens + 1)
            steps.assign_to(state, index, slot, 1)
            budget -= 1
            position += 1
            continue
        num_tokens = uncomputed_tokens(state, slot, threshold, budget - slots)
        num_tokens = min(num_tokens, engine.max_model_len - request.computed_tokens - 1)
        has_inputs = encoder_inputs.has_some(state, slot)
        if has_inputs:
            num_tokens = encoder_inputs.limit(state, slot, request.computed_tokens, num_tokens)
        if engine.num_prefill_lookahead_tokens > 0:
            num_tokens = shortened(state, slot, request.computed_tokens, num_tokens)
        if num_tokens <= 0:
            if has_inputs:
                encoder_inputs.drop(state, slot)
            steady = False
            position += 1
            continue
        position, freed = make_room(state, position, slot, with_lookahead(state, request.computed_tokens + num_tokens))
        budget += freed
        if position < 0:
            if has_inputs:
                encoder_inputs.drop(state, slot)
            return budget, False
        if request.status == WAITING:  # it has preempted itself
            continue
        give_blocks(state, slot, request.computed_tokens + num_tokens)
        if has_inputs:
            encoder_inputs.commit(state, slot)
        steady = steady and goes_on_decoding(state, slot, request.computed_tokens + num_tokens)
        steps.assign(state, slot, num_tokens)
        budget -= num_tokens + slots
        position += 1
    return budget, steady and position == engine.num_running


@small_kernel
def has_simple_decodes(engine: np.record) -> bool:
    """Return whether requests that decode need nothing but a token and its block: no draft tokens, no encoder."""
    return bool(
        engine.num_speculative_tokens == 0
        and engine.max_encoder_tokens == 0
        and engine.draft_slots == 0
        and engine.num_lookahead_tokens == 0
        and engine.num_prefill_lookahead_tokens == 0
    )


@small_kernel
def is_simple_decode(state: State, slot: int) -> bool:
    """Return whether a request decodes a token for which it has room, in a block that is not full with it."""
    computed = state.requests[slot].computed_tokens + 1
    return (
        computed == steps.tokens_of(state, slot)
        and computed < state.engine[0].max_model_len
        and blocks.has_room(state, slot, computed)
        and not blocks.fills_block(state, slot, computed)
    )


@small_kernel
def is_ending(state: State, slot: int) -> bool:
    """Return whether the step in flight will produce the last token of a request (async scheduling)."""
    request = state.requests[slot]
    return request.placeholders > 0 and (
        request.computed_tokens + 2 - request.placeholders >= request.prompt_tokens + request.max_tokens
    )


@small_kernel
def goes_on_decoding(state: State, slot: int, computed_tokens: int) -> bool:
    """Return whether a request will decode from the next step on, once `computed_tokens` of it are computed.

    Where steps are planned ahead, it must be decoding already. A request that will register blocks which others can
    hit does not count, because that changes how the others are scheduled.
    """
    request = state.requests[slot]
    if computed_tokens < steps.tokens_of(state, slot) or request.num_hashes > request.full_blocks:
        return False
    return state.engine[0].pipeline_depth == 1 or (
        request.output_tokens + request.placeholders > 0 and computed_tokens == request.computed_tokens + 1
    )


@small_kernel
def uncomputed_tokens(state: State, slot: int, threshold: int, budget: int) -> int:
    """Return the tokens that the request still has to compute, limited by the long-prefill threshold and the budget."""
    num_tokens = steps.tokens_of(state, slot) - state.requests[slot].computed_tokens
    if state.engine[0].num_speculative_tokens > 0:
        num_tokens += state.requests[slot].draft_tokens
    if 0 < threshold < num_tokens:
        num_tokens = threshold
    return min(num_tokens, budget)


@small_kernel
def make_room(state: State, position: int, slot: int, num_tokens: int) -> tuple[int, int]:
    """Preempt requests until there are blocks for `num_tokens` tokens of this one.

    Returns its position, or PREEMPTED_ITSELF where that ends the loop, or NO_VICTIM where the blocks of the next victim
    cannot be freed yet; and the budget of preempted requests that were already in this step (with priorities only).
    """
    if blocks.has_room(state, slot, num_tokens):
        return position, 0
    return preempt_for(state, position, slot, num_tokens)


@kernel
def preempt_for(state: State, position: int, slot: int, num_tokens: int) -> tuple[int, int]:
    """Preempt the last running request, or the one with the lowest rank, until blocks suffice; see `make_room`."""
    engine = state.engine[0]
    freed = 0
    while blocks.blocks_for(num_tokens, engine.block_size) - state.requests[slot].num_blocks > engine.num_free_blocks:
        chosen = queues.lowest_ranked(state) if engine.by_priority else engine.num_running - 1
        if engine.defers_frees and state.requests[state.running[chosen]].in_flight_tokens > 0:
            return NO_VICTIM, freed
        encoder_tokens = 0
        if encoder_inputs.has_some(state, state.running[chosen]):
            encoder_tokens = encoder_inputs.tokens_in_step(state, state.running[chosen])
        victim = queues.preempt(state, chosen)
        if victim == slot:
            return (position if engine.goes_on_after_self_preemption else PREEMPTED_ITSELF), freed
        restored = steps.unassign(state, victim)
        freed += restored + engine.draft_slots if restored > 0 else 0
        engine.encoder_tokens_left += encoder_tokens
        if chosen < position:
            position -= 1
    return position, freed


@small_kernel
def give_blocks(state: State, slot: int, num_tokens: int) -> None:
    """Allocate blocks for `num_tokens` tokens and the look-ahead, and register those that known tokens fill."""
    request = state.requests[slot]
    blocks.allocate(state, slot, with_lookahead(state, num_tokens))
    blocks.register_full(state, slot, min(num_tokens, request.prompt_tokens + request.output_tokens))


@small_kernel
def with_lookahead(state: State, num_tokens: int) -> int:
    """Return the number of tokens that need slots once `num_tokens` are computed, the look-ahead included."""
    engine = state.engine[0]
    return min(num_tokens + engine.num_lookahead_tokens, max(num_tokens, engine.max_model_len))


@small_kernel
def shortened(state: State, slot: int, computed_tokens: int, num_tokens: int) -> int:
    """Return the tokens of a chunk such that the next one is the last, or leaves enough (`_reserve_prefill_lookahead`).

    It may be 0 or less.
    """
    request, ahead = state.requests[slot], state.engine[0].num_prefill_lookahead_tokens
    rest = request.prompt_tokens + request.output_tokens - computed_tokens - num_tokens
    return num_tokens - (ahead - rest) if 0 < rest < ahead else num_tokens


@kernel
def pads_decodes(state: State) -> bool:
    """Return whether admitted requests that need one token are filled up with draft tokens, as the other decodes are.

    That is so unless the step has a chunk of a running request's prompt.
    """
    if state.engine[0].num_speculative_tokens == 0:
        return False
    index = steps.current(state)
    for position in range(state.steps[index].num_scheduled):
        request = state.requests[state.batch[index, position].slot]
        if request.computed_tokens < request.prefill_tokens:
            return False
    return True


@small_kernel
def needs_padding(state: State, slot: int, computed_tokens: int, runs: bool) -> bool:
    """Return whether a waiting request needs one token, beside running ones in the step or after cached tokens."""
    engine, request = state.engine[0], state.requests[slot]
    if request.prompt_tokens + request.output_tokens - computed_tokens != 1 or not (runs or computed_tokens > 0):
        return False
    return computed_tokens + 2 + engine.num_speculative_tokens <= engine.max_model_len


@small_kernel
def tokens_to_admit(state: State, slot: int, computed_tokens: int, threshold: int, budget: int, padded: bool) -> int:
    """Return the tokens of a waiting request in this step; 0 or less where it has to wait."""
    engine, request = state.engine[0], state.requests[slot]
    remaining = request.prompt_tokens + request.output_tokens - computed_tokens
    if padded:
        remaining += engine.num_speculative_tokens
        if remaining > budget:
            return 0
    if 0 < threshold < remaining:
        remaining = threshold
    if not engine.chunked_prefill and remaining > budget:
        return 0
    num_tokens = min(remaining, budget)
    if engine.num_prefill_lookahead_tokens > 0:
        num_tokens = shortened(state, slot, computed_tokens, num_tokens)
    return num_tokens


@kernel
def schedule_waiting(state: State, budget: int, threshold: int) -> bool:  # noqa: C901, PLR0912, PLR0915 - as vLLM's
    """Admit from the head of the queue until seats, budget or blocks run out.

    Returns whether the next step will admit no request, and those admitted now will all decode in it.
    """
    engine = state.engine[0]
    slots = engine.draft_slots
    pads, runs = pads_decodes(state), state.steps[steps.current(state)].num_scheduled > 0
    steady = True
    position = 0  # requests are skipped that fetch their blocks, or have stale output in flight
    while budget > slots and position < engine.num_waiting and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, position)
        request = state.requests[slot]
        if remote_kv.is_under_way(request.stage):
            position += 1
            continue
        if request.stage in (FETCHED, FETCH_FAILED):
            remote_kv.promote(state, slot)
        if request.stale_tokens > 0 and not engine.drops_stale:
            steady = False
            position += 1
            continue
        if engine.max_loras > 0 and adapters.must_wait(state, slot):
            position += 1
            continue
        if engine.fetches and request.num_blocks > 0:
            num_tokens = continue_fetched(state, position, slot, threshold, budget)
            if num_tokens == 0:
                return steady and engine.chunked_prefill
            steady = steady and goes_on_decoding(state, slot, request.computed_tokens + num_tokens)
            budget -= num_tokens
            if engine.max_loras > 0:
                adapters.note(state, slot)
            continue
        num_hits = blocks.find_hits(state, slot)
        if request.stage == TO_FETCH:
            if not give_blocks_to_fetch(state, position, slot, num_hits):
                return steady and num_hits == 0
            position += 1
            continue
        computed = queues.computed_before(state, slot, num_hits * engine.block_size)
        padded = pads and needs_padding(state, slot, computed, runs)
        num_tokens = tokens_to_admit(state, slot, computed, threshold, budget - slots, padded)
        if num_tokens <= 0:
            return False
        has_inputs = encoder_inputs.has_some(state, slot)
        if has_inputs:
            num_tokens = encoder_inputs.limit(state, slot, computed, num_tokens)
            if num_tokens <= 0:
                encoder_inputs.drop(state, slot)
                return False
        if not fits(state, slot, num_hits, computed + num_tokens):
            if has_inputs:  # it is tried again in each step, which makes outputs in the cache the newest
                encoder_inputs.release(state, slot)
                return False
            # with fewer hits the first chunk needs fewer blocks: it may fit after decodes have evicted some hits
            return steady and (num_hits == 0 or engine.reserve_full_isl == 1)
        queues.admit(state, position, computed)
        blocks.adopt_hits(state, slot, num_hits)
        give_blocks(state, slot, computed + num_tokens)
        if has_inputs:
            encoder_inputs.commit(state, slot)
        if engine.max_loras > 0:
            adapters.note(state, slot)
        steady = steady and goes_on_decoding(state, slot, computed + num_tokens)
        steps.assign(state, slot, num_tokens)
        if padded:
            steps.pad(state, slot)
        budget -= num_tokens + slots
    # the budget was used up by prompts, so the next step may have some for the queue
    used_up = budget == 0 and engine.num_running < engine.max_num_batched_tokens
    return steady and not (used_up and engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs)


@kernel
def continue_fetched(state: State, position: int, slot: int, threshold: int, budget: int) -> int:
    """Schedule a waiting request that holds blocks, as its KV was fetched; return its tokens, 0 if it does not fit."""
    engine, request = state.engine[0], state.requests[slot]
    before = request.computed_tokens
    remaining = request.prompt_tokens + request.output_tokens - before
    if 0 < threshold < remaining:
        remaining = threshold
    if not engine.chunked_prefill and remaining > budget:
        return 0
    num_tokens = min(remaining, budget)
    needed = before + num_tokens
    if engine.reserve_full_isl:
        needed = max(needed, request.prompt_tokens + request.output_tokens)
    missing = max(0, blocks.blocks_for(needed, engine.block_size) - request.num_blocks)
    if missing + (engine.watermark_blocks if engine.num_running > 0 else 0) > engine.num_free_blocks:
        return 0
    queues.admit(state, position, before)
    give_blocks(state, slot, before + num_tokens)
    steps.assign(state, slot, num_tokens)
    return num_tokens


@kernel
def give_blocks_to_fetch(state: State, position: int, slot: int, num_hits: int) -> bool:
    """Allocate blocks for a request's whole prompt, and start to fetch what is not cached; False if it does not fit."""
    engine, request = state.engine[0], state.requests[slot]
    size = engine.block_size
    num_tokens, num_blocks = request.prompt_tokens, blocks.blocks_for(request.prompt_tokens, size)
    if num_blocks > spare_blocks(state, slot, num_hits) - remote_kv.reserved_blocks(state):
        return False
    request.computed_tokens = num_tokens
    request.hit_tokens = num_hits * size
    request.prefill_tokens = num_tokens
    blocks.adopt_hits(state, slot, num_hits)
    blocks.allocate(state, slot, num_tokens)
    queues.keep_waiting_with_blocks(state, position)
    remote_kv.start_fetch(state, slot, num_tokens - num_hits * size, num_blocks - num_hits)
    return True


@kernel
def fits(state: State, slot: int, num_hits: int, num_tokens: int) -> bool:
    """Return whether blocks suffice to admit the request: for this step, or for all its tokens where so configured."""
    engine, request = state.engine[0], state.requests[slot]
    num_tokens = with_lookahead(state, num_tokens)
    if engine.reserve_full_isl:
        num_tokens = max(num_tokens, request.prompt_tokens + request.output_tokens)
    return blocks.blocks_for(num_tokens, engine.block_size) <= spare_blocks(state, slot, num_hits)


@small_kernel
def spare_blocks(state: State, slot: int, num_hits: int) -> int:
    """Return how many blocks a waiting request may have, those that it hits included."""
    engine = state.engine[0]
    spare = engine.num_free_blocks - blocks.count_idle(state, slot, num_hits) + num_hits
    return spare - engine.watermark_blocks if engine.num_running > 0 else spare
