"""vLLM v0 (0.7.2): prefills go first and alone, 1 % of the blocks is kept back, the youngest is preempted.

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
    # with priorities, it is the priority policy that may have something to say next
    settled = not engine.by_priority or engine.num_waiting == 0
    return settled and decoding.all_sampled_before(state) and state.steps[steps.current(state)].num_preempted == 0


@kernel
def schedule_chunked(state: State) -> bool:
    """What runs goes on, then new prompts, within one budget; priorities are not looked at in this mode."""
    engine = state.engine[0]
    budget = go_on(state, engine.max_num_batched_tokens)
    num_decodes = engine.max_num_batched_tokens - budget
    steady = num_decodes == engine.num_running and decoding.all_sampled_before(state)
    num_admitted = admit_prompts(state, budget)
    return steady and num_admitted == 0 and state.steps[steps.current(state)].num_preempted == 0


@kernel
def go_on(state: State, budget: int) -> int:
    """Decode, and go on with prompts, in order; where blocks are short, the last in the list gives way."""
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
    """Blocks that must be free for a request to go on (`BlockTable.get_num_blocks_touched_by_append_slots`).

    One for the newest token, as if its block were full; and one for a prompt under way, although its blocks are all
    there, unless it fills them.
    """
    if not decoding.has_prefill_left(state, slot):
        return 1
    return 0 if steps.tokens_of(state, slot) % state.engine[0].block_size == 0 else 1


@kernel
def admit_prompts(state: State, budget: int) -> int:
    """Admit in order while seats, budget and blocks for whole prompts last; return how many.

    Requests that this step preempted stand in front of the queue and are passed over: they come back later.
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
    """Preempt running requests that rank below the head of the queue until it could enter; then sort the queue.

    Only here does this scheduler look at priorities: the queue it takes the head of is as arrivals left it.
    """
    engine = state.engine[0]
    sort_running(state)
    if engine.num_waiting > 0:
        head = queues.waiting_at(state, 0)
        needed = blocks.blocks_for(steps.tokens_of(state, head), engine.block_size)
        while engine.num_running > 0:
            seated = engine.num_running < engine.max_num_seqs
            fits = needed <= engine.num_free_blocks - engine.watermark_blocks
            if (seated and fits) or not ranks_before(state, head, state.running[engine.num_running - 1]):
                break
            queues.preempt(state, engine.num_running - 1)
    sort_waiting(state)


@kernel
def ranks_before(state: State, slot: int, other: int) -> bool:
    """Order by priority, then arrival; lower goes first, and equals stay as they are."""
    a, b = state.requests[slot], state.requests[other]
    return a.priority < b.priority or (a.priority == b.priority and a.arrival_s < b.arrival_s)


@kernel
def sort_running(state: State) -> None:
    """Sort the running list by rank."""
    for end in range(1, state.engine[0].num_running):
        slot = state.running[end]
        place = end
        while place > 0 and ranks_before(state, slot, state.running[place - 1]):
            state.running[place] = state.running[place - 1]
            place -= 1
        state.running[place] = slot


@kernel
def sort_waiting(state: State) -> None:
    """Sort the waiting queue by rank."""
    engine, size = state.engine[0], len(state.waiting)
    for end in range(1, engine.num_waiting):
        slot = queues.waiting_at(state, end)
        place = end
        while place > 0 and ranks_before(state, slot, queues.waiting_at(state, place - 1)):
            state.waiting[queues.at(engine.waiting_head, place, size)] = queues.waiting_at(state, place - 1)
            place -= 1
        state.waiting[queues.at(engine.waiting_head, place, size)] = slot
