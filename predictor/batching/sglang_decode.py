"""Decoding in SGLang (0.5.23): the new-token ratio, mixed batches, and retraction where pages are short.

Mirrors `Scheduler.update_running_batch`, `ScheduleBatch.retract_decode` and `NewTokenRatioTracker`.
"""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.batching import decoding
from predictor.compiled import kernel, small_kernel
from predictor.state import State

# The options, in the order in which the table of local schedulers declares them.
(
    CONSERVATIVENESS, LONGEST_PREFIX, MAX_PREFILL_TOKENS, MIXED_CHUNK, INIT_RATIO, MIN_RATIO_FACTOR, DECAY_STEPS,
    RETRACT_STEPS, CLIP_MAX_NEW_TOKENS,
) = range(9)  # fmt: skip

# What it remembers between steps: the new-token ratio, whether nothing is admitted until a running request leaves, how
# many requests the running batch and a prefill batch had, whether any was running, and the steps whose decay is known.
RATIO, IS_FULL, NUM_BATCHED, HAD_RUNNING, STEPS_SEEN = range(5)


@small_kernel
def init_ratio(state: State) -> float:
    """Return the share of a response's remaining tokens that an idle engine reserves."""
    return min(state.engine[0].options[INIT_RATIO] * state.engine[0].options[CONSERVATIVENESS], 1.0)


@small_kernel
def decay_ratio(state: State) -> None:
    """Lower the ratio, as every decode without a retraction does."""
    engine = state.engine[0]
    first = init_ratio(state)
    lowest = min(first * engine.options[MIN_RATIO_FACTOR], 1.0)
    engine.memory[RATIO] = max(engine.memory[RATIO] - (first - lowest) / engine.options[DECAY_STEPS], lowest)


@small_kernel
def is_ending(state: State, slot: int) -> bool:
    """Return whether the step in flight will produce the last token of a request (`next_output_finishes_by_length`)."""
    request = state.requests[slot]
    return request.placeholders > 0 and request.output_tokens + 1 >= request.max_tokens


@small_kernel
def joins_decode(state: State, slot: int) -> bool:
    """Return whether a running request takes part in a decode."""
    return not decoding.has_prefill_left(state, slot) and not is_ending(state, slot)


@small_kernel
def needs_page(state: State, slot: int) -> int:
    """Return how many pages the next token of a request needs."""
    request = state.requests[slot]
    return blocks.blocks_for(request.computed_tokens + 1, state.engine[0].block_size) - request.num_blocks


@kernel
def mix_decodes(state: State, num_prefills: int) -> int:
    """Add the decodes to a step with prefills if their pages are free; return the number of requests left out of it."""
    engine = state.engine[0]
    num_decodes = num_pages = num_left = 0
    for position in range(engine.num_running):
        slot = state.running[position]
        if is_in_step(state, slot, num_prefills) or decoding.has_prefill_left(state, slot):
            continue
        if is_ending(state, slot):
            engine.memory[IS_FULL] = 0
            continue
        num_decodes += 1
        num_pages += needs_page(state, slot)
    if not can_take(state, num_pages):
        return num_decodes
    for position in range(engine.num_running):
        slot = state.running[position]
        if not is_in_step(state, slot, num_prefills) and joins_decode(state, slot):
            blocks.allocate(state, slot, state.requests[slot].computed_tokens + 1)
            steps.assign(state, slot, 1)
    index = steps.current(state)
    num_scheduled = state.steps[index].num_scheduled
    for position in range(engine.num_running):  # the running batch continues in the order of this step
        slot = state.running[position]
        if not is_in_step(state, slot, num_scheduled):
            state.turns[num_left] = slot
            num_left += 1
    for position in range(num_scheduled):
        state.running[position] = state.batch[index, position].slot
    for position in range(num_left):
        state.running[num_scheduled + position] = state.turns[position]
    return 0


@kernel
def is_in_step(state: State, slot: int, num_entries: int) -> bool:
    """Return whether a request is among the first entries of the step that is being planned."""
    index = steps.current(state)
    found = False
    for position in range(num_entries):
        found = found or state.batch[index, position].slot == slot
    return found


@kernel
def decode(state: State) -> int:
    """Schedule a token of each running request, after retractions where pages are short; return their number."""
    engine = state.engine[0]
    num_decodes = num_pages = num_ending = 0
    for position in range(engine.num_running):
        slot = state.running[position]
        num_ending += is_ending(state, slot)
        if joins_decode(state, slot):
            num_decodes += 1
            num_pages += needs_page(state, slot)
    if num_ending > 0 or num_decodes == 0:
        engine.memory[IS_FULL] = 0
    if num_decodes == 0:
        return 0
    if not can_take(state, num_pages):
        if num_ending > 0:
            return num_decodes  # the step in flight will free pages: nothing is decoded before
        num_decodes = retract(state, num_decodes)
        engine.memory[IS_FULL] = 0
    else:
        decay_ratio(state)
    for position in range(engine.num_running):
        slot = state.running[position]
        if joins_decode(state, slot):
            blocks.allocate(state, slot, state.requests[slot].computed_tokens + 1)
            steps.assign(state, slot, 1)
    return num_decodes


@kernel
def retract(state: State, num_decodes: int) -> int:
    """Retract the requests with the fewest output tokens to the end of the queue until the others fit.

    Returns how many are left. What they have computed is lost, except for their prompts, which stay cached.
    """
    engine = state.engine[0]
    order_by_output(state)
    num_kept = num_decodes
    while num_kept > 1 and (num_kept == num_decodes or not can_take(state, pages_needed(state, num_kept))):
        num_kept -= 1
        retract_at(state, num_kept)
        blocks.drop_cached(state, blocks.blocks_for(num_kept * int(engine.options[RETRACT_STEPS]), engine.block_size))
    if not can_take(state, pages_needed(state, num_kept)):  # SGLang aborts it: no request holds other pages
        num_kept = 0
        retract_at(state, 0)
    num_output = max_output = 0
    for position in range(num_kept):
        num_output += state.requests[state.running[position]].output_tokens
        max_output += state.requests[state.running[position]].max_tokens
    ratio = (num_output + engine.options[RETRACT_STEPS] * num_kept) / (max_output + 1)
    engine.memory[RATIO] = min(1.0, ratio) if num_kept else init_ratio(state)
    return num_kept


@small_kernel
def can_take(state: State, num_pages: int) -> bool:
    """Return whether so many pages are free; cached ones are evicted for them also where they do not suffice."""
    if num_pages <= state.engine[0].num_free_blocks:
        return True
    blocks.drop_cached(state, num_pages)
    return False


@kernel
def retract_at(state: State, position: int) -> None:
    """Move a running request to the end of the queue."""
    queues.preempt(state, position)
    queues.enqueue(state, queues.take_waiting(state, 0))


@kernel
def pages_needed(state: State, num_decodes: int) -> int:
    """Return how many pages the next token of the first running requests needs."""
    needed = 0
    for position in range(num_decodes):
        needed += needs_page(state, state.running[position])
    return needed


@kernel
def order_by_output(state: State) -> None:
    """Order the running requests by output tokens, the most first, then by prompt, the shortest first.

    Requests that do not decode are behind all others.
    """
    for end in range(1, state.engine[0].num_running):
        slot = state.running[end]
        rank = end
        while rank > 0 and is_kept_before(state, slot, state.running[rank - 1]):
            state.running[rank] = state.running[rank - 1]
            rank -= 1
        state.running[rank] = slot


@kernel
def is_kept_before(state: State, slot: int, other: int) -> bool:
    """Return whether a request is retracted after another one (`_get_decode_retraction_order`)."""
    a, b = state.requests[slot], state.requests[other]
    if joins_decode(state, slot) != joins_decode(state, other):
        return joins_decode(state, slot)
    if a.output_tokens != b.output_tokens:
        return a.output_tokens > b.output_tokens
    return a.prompt_tokens < b.prompt_tokens
