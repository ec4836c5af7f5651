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
    return decoding.all_sampled_before(state) and state.steps[steps.current(state)].num_preempted == 0


@kernel
def schedule_chunked(state: State) -> bool:
    """Decodes first, then the prompts under way, then new ones, within one budget."""
    engine = state.engine[0]
    num_decodes = decoding.decode_all(state)
    budget = engine.max_num_batched_tokens - num_decodes
    steady = num_decodes == engine.num_running and decoding.all_sampled_before(state)
    if state.steps[steps.current(state)].num_preempted > 0:
        return False
    budget = continue_prompts(state, budget)
    return admit_prompts(state, budget) == 0 and steady


@kernel
def continue_prompts(state: State, budget: int) -> int:
    """Give the prompts that are partly computed what is left of the budget, in order; return what is left then."""
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        if budget > 0 and decoding.has_prefill_left(state, slot):
            num_tokens = min(steps.tokens_of(state, slot) - state.requests[slot].computed_tokens, budget)
            steps.assign(state, slot, num_tokens)
            budget -= num_tokens
    return budget


@kernel
def admit_prompts(state: State, budget: int) -> int:
    """Admit from the head of the queue while seats, budget and blocks for whole prompts last; return how many."""
    engine = state.engine[0]
    num_admitted = 0
    while budget > 0 and engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, 0)
        num_tokens = steps.tokens_of(state, slot)
        if num_tokens > budget and not engine.chunked_prefill:
            break
        if blocks.blocks_for(num_tokens, engine.block_size) > engine.num_free_blocks - engine.watermark_blocks:
            break
        queues.admit(state, 0, 0)
        blocks.allocate(state, slot, num_tokens)
        steps.assign(state, slot, min(num_tokens, budget))
        budget -= num_tokens
        num_admitted += 1
    return num_admitted


@kernel
def resolve_inversion(state: State) -> None:
    """Preempt running requests that rank below the head of the queue until it could enter (priority policy)."""
    engine = state.engine[0]
    if engine.num_waiting == 0:
        return
    head = queues.waiting_at(state, 0)
    needed = blocks.blocks_for(steps.tokens_of(state, head), engine.block_size)
    while engine.num_running > 0:
        worst = queues.lowest_ranked(state)
        seated = engine.num_running < engine.max_num_seqs
        fits = needed <= engine.num_free_blocks - engine.watermark_blocks
        if (seated and fits) or not queues.goes_before(state, head, state.running[worst]):
            return
        queues.preempt(state, worst)
