"""vLLM v0 (0.7.2): prefills go first and alone, 1 % of the blocks stays free, the last admitted request is preempted.

Mirrors `Scheduler._schedule_default` and, with chunked prefill, `_schedule_chunked_prefill`, for one sequence per
request and preemption by recompute.
"""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.batching import decoding
from predictor.compiled import kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Fill the step with prefills, or else with decodes; with chunked prefill, with both."""
    engine = state.engine[0]
    if engine.chunked_prefill:
        return schedule_chunked(state)
    if admit_prompts(state, engine.max_num_batched_tokens) > 0:
        return False
    if engine.by_priority:
        resolve_inversion(state)
    decoding.decode_all(state)
    # with priorities, the next step may preempt for a waiting request
    settled = not engine.by_priority or engine.num_waiting == 0
    return settled and decoding.all_sampled_before(state) and state.steps[steps.current(state)].num_preempted == 0


@kernel
def schedule_chunked(state: State) -> bool:
    """Schedule running requests, then new prompts, within one budget; this mode ignores priorities."""
    engine = state.engine[0]
    budget = schedule_running(state, engine.max_num_batched_tokens)
    num_decodes = engine.max_num_batched_tokens - budget
    steady = num_decodes == engine.num_running and decoding.all_sampled_before(state)
    num_admitted = admit_prompts(state, budget)
    return steady and num_admitted == 0 and state.steps[steps.current(state)].num_preempted == 0


@kernel
def schedule_running(state: State, budget: int) -> int:
    """Decode and continue prompts, in order; where blocks are short, the last running request is preempted."""
    position = 0
    while position < state.engine[0].num_running and budget > 0:
        slot = state.running[position]
        request = state.requests[slot]
        while state.engine[0].num_free_blocks < touched_blocks(state, slot):
            if queues.preempt(state, state.engine[0].num_running - 1) == slot:
                return budget
        num_tokens = min(steps.tokens_of(state, slot) - request.computed_tokens, budget)
        blocks.allocate(state, slot, request.computed_tokens + num_tokens)
        steps.assign(state, slot, num_tokens)
        budget -= num_tokens
        position += 1
    return budget


@kernel
def touched_blocks(state: State, slot: int) -> int:
    """Return the blocks that must be free to continue (`BlockTable.get_num_blocks_touched_by_append_slots`).

    One for a decode, even where its block is not full; and one for a started prompt, although it has all its blocks,
    unless it fills the last one.
    """
    if not decoding.has_prefill_left(state, slot):
        return 1
    return 0 if steps.tokens_of(state, slot) % state.engine[0].block_size == 0 else 1


@kernel
def admit_prompts(state: State, budget: int) -> int:
    """Admit in order while seats, budget and blocks for whole prompts last; return the number.

    Requests that this step has preempted are at the front of the queue, and are skipped.
    """
    engine = state.engine[0]
    num_admitted = 0
    position = state.steps[steps.current(state)].num_preempted
    while budget > 0 and position < engine.num_waiting and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, position)
        num_tokens = steps.tokens_of(state, slot)
        if num_tokens > budget and not engine.chunked_prefill:
            break
        if blocks.blocks_for(num_tokens, engine.block_size) > engine.num_free_blocks - engine.watermark_blocks:
            break
        queues.admit(state, position, 0)
        blocks.allocate(state, slot, num_tokens)
        steps.assign(state, slot, min(num_tokens, budget))
        budget -= num_tokens
        num_admitted += 1
    return num_admitted


@kernel
def resolve_inversion(state: State) -> None:
    """Preempt running requests that rank below the head of the queue until it fits; then sort the queue.

    Only this function uses priorities; before it, the queue is in the order of arrivals.
    """
    engine = state.engine[0]
    sort_running(state)
    if engine.num_waiting > 0:
        head = queues.waiting_at(state, 0)
        needed = blocks.blocks_for(steps.tokens_of(state, head), engine.block_size)
        while engine.num_running > 0:
            has_seat = engine.num_running < engine.max_num_seqs
            fits = needed <= engine.num_free_blocks - engine.watermark_blocks
            if (has_seat and fits) or not ranks_before(state, head, state.running[engine.num_running - 1]):
                break
            queues.preempt(state, engine.num_running - 1)
    sort_waiting(state)


@kernel
def ranks_before(state: State, slot: int, other: int) -> bool:
    """Return whether a request goes before another by priority, then arrival; the lower one goes first."""
    a, b = state.requests[slot], state.requests[other]
    return a.priority < b.priority or (a.priority == b.priority and a.arrival_s < b.arrival_s)


@kernel
def sort_running(state: State) -> None:
    """Sort the running list by rank."""
    for end in range(1, state.engine[0].num_running):
        slot = state.running[end]
        rank = end
        while rank > 0 and ranks_before(state, slot, state.running[rank - 1]):
            state.running[rank] = state.running[rank - 1]
            rank -= 1
        state.running[rank] = slot


@kernel
def sort_waiting(state: State) -> None:
    """Sort the waiting queue by rank."""
    engine, size = state.engine[0], len(state.waiting)
    for end in range(1, engine.num_waiting):
        slot = queues.waiting_at(state, end)
        rank = end
        while rank > 0 and ranks_before(state, slot, queues.waiting_at(state, rank - 1)):
            state.waiting[queues.at(engine.waiting_head, rank, size)] = queues.waiting_at(state, rank - 1)
            rank -= 1
        state.waiting[queues.at(engine.waiting_head, rank, size)] = slot
