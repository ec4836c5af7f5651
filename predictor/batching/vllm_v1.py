"""vLLM v1 (0.32): running requests first, then waiting ones, within one token budget; preemption by recompute.

Mirrors `Scheduler.schedule` and `KVCacheManager.allocate_slots` for text requests without speculation.
"""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.compiled import kernel, small_kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Fill the step; return whether the next one will be a decode of all that run, if nothing ends or arrives."""
    engine = state.engine[0]
    threshold = engine.long_prefill_token_threshold if engine.num_running + engine.num_waiting > 1 else 0
    budget, steady = schedule_running(state, engine.max_num_batched_tokens, threshold)
    if state.steps[steps.current(state)].num_preempted > 0:
        return False
    return schedule_waiting(state, budget, threshold) and steady


@kernel
def schedule_running(state: State, budget: int, threshold: int) -> tuple[int, bool]:
    """Let running requests go on; return the budget left, and whether all of them decode from the next step on."""
    engine = state.engine[0]
    steady = True
    position = 0
    while position < engine.num_running and budget > 0:
        slot = state.running[position]
        request = state.requests[slot]
        # async: the step under way is known to bring its last token
        ending = request.placeholders > 0 and (
            request.computed_tokens + 2 - request.placeholders >= request.prompt_tokens + request.max_tokens
        )
        if ending:
            position += 1
            continue
        num_tokens = wanted(state, slot, threshold, budget)
        num_tokens = min(num_tokens, engine.max_model_len - request.computed_tokens - 1)
        if num_tokens <= 0:
            steady = False
            position += 1
            continue
        position, freed = make_room(state, position, slot, request.computed_tokens + num_tokens)
        budget += freed
        if position < 0:
            return budget, False
        give_blocks(state, slot, request.computed_tokens + num_tokens)
        steady = steady and goes_on_decoding(state, slot, request.computed_tokens + num_tokens)
        steps.assign(state, slot, num_tokens)
        budget -= num_tokens
        position += 1
    return budget, steady and position == engine.num_running


@small_kernel
def goes_on_decoding(state: State, slot: int, computed_tokens: int) -> bool:
    """Tell whether a request will decode from the next step on, once so much of it is computed.

    Where steps are planned ahead it must have begun: its first token is then under way with the step before. One
    that may yet fill blocks which others wait to hit changes more than itself.
    """
    request = state.requests[slot]
    if computed_tokens < steps.tokens_of(state, slot) or request.num_hashes > request.full_blocks:
        return False
    return state.engine[0].pipeline_depth == 1 or (
        request.output_tokens + request.placeholders > 0 and computed_tokens == request.computed_tokens + 1
    )


@small_kernel
def wanted(state: State, slot: int, threshold: int, budget: int) -> int:
    """Tokens that the request has but has not computed, within the threshold for long prefills and the budget."""
    num_tokens = steps.tokens_of(state, slot) - state.requests[slot].computed_tokens
    if 0 < threshold < num_tokens:
        num_tokens = threshold
    return min(num_tokens, budget)


@small_kernel
def make_room(state: State, position: int, slot: int, num_tokens: int) -> tuple[int, int]:
    """Preempt until the request's tokens have blocks.

    Returns its position, or -1 when it had to go itself, and the budget given back by victims that were already
    in this step (which only happens under priorities).
    """
    if blocks.has_room(state, slot, num_tokens):
        return position, 0
    return preempt_for(state, position, slot, num_tokens)


@kernel
def preempt_for(state: State, position: int, slot: int, num_tokens: int) -> tuple[int, int]:
    """Preempt the last in the list, or the lowest ranked, until the request's tokens have blocks; see `make_room`."""
    engine = state.engine[0]
    freed = 0
    while blocks.blocks_for(num_tokens, engine.block_size) - state.requests[slot].num_blocks > engine.num_free_blocks:
        place = queues.lowest_ranked(state) if engine.by_priority else engine.num_running - 1
        victim = queues.preempt(state, place)
        if victim == slot:
            return -1, freed
        freed += steps.unassign(state, victim)
        if place < position:
            position -= 1
    return position, freed


@small_kernel
def give_blocks(state: State, slot: int, num_tokens: int) -> None:
    """Allocate for so many tokens, and register the blocks that known tokens fill, at once."""
    request = state.requests[slot]
    blocks.allocate(state, slot, num_tokens)
    blocks.register_full(state, slot, min(num_tokens, request.prompt_tokens + request.output_tokens))


@kernel
def schedule_waiting(state: State, budget: int, threshold: int) -> bool:
    """Admit from the head of the queue until something is short.

    Returns whether the next step will admit nobody, and those admitted now will all decode in it.
    """
    engine = state.engine[0]
    steady = True
    position = 0  # requests whose output is still under way are passed over
    while budget > 0 and position < engine.num_waiting and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, position)
        request = state.requests[slot]
        if request.stale_tokens > 0:
            steady = False
            position += 1
            continue
        num_hits = blocks.find_hits(state, slot)
        computed = num_hits * engine.block_size
        remaining = request.prompt_tokens + request.output_tokens - computed
        if 0 < threshold < remaining:
            remaining = threshold
        if not engine.chunked_prefill and remaining > budget:
            return False
        num_tokens = min(remaining, budget)
        if not fits(state, slot, num_hits, computed + num_tokens):
            # a first chunk behind fewer hits needs fewer blocks: it may fit once decodes have evicted some
            return steady and (num_hits == 0 or engine.reserve_full_isl == 1)
        queues.admit(state, position, computed)
        blocks.adopt_hits(state, slot, num_hits)
        give_blocks(state, slot, computed + num_tokens)
        steady = steady and goes_on_decoding(state, slot, computed + num_tokens)
        steps.assign(state, slot, num_tokens)
        budget -= num_tokens
    # with the budget spent on prompts, there may be some for the queue in the next step
    used_up = budget == 0 and engine.num_running < engine.max_num_batched_tokens
    return steady and not (used_up and engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs)


@kernel
def fits(state: State, slot: int, num_hits: int, num_tokens: int) -> bool:
    """Tell whether blocks suffice to admit the request: for this step, or for all its tokens where so configured."""
    engine, request = state.engine[0], state.requests[slot]
    spare = engine.num_free_blocks - blocks.count_idle(state, slot, num_hits) + num_hits
    if engine.num_running > 0:
        spare -= engine.watermark_blocks
    if engine.reserve_full_isl:
        num_tokens = max(num_tokens, request.prompt_tokens + request.output_tokens)
    return blocks.blocks_for(num_tokens, engine.block_size) <= spare
