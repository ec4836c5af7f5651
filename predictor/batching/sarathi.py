"""Sarathi-Serve (OSDI 24, Algorithm 3): stall-free batching; decodes never wait, prefill chunks fill the budget.

All blocks of a prompt are allocated on admission, as in the vLLM version on which Sarathi-Serve is built.
"""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.batching import decoding
from predictor.compiled import kernel
from predictor.state import State


@kernel
def schedule(state: State) -> bool:
    """Fill the step with decodes, then started prompts, then new prompts, within the token budget."""
    engine = state.engine[0]
    num_decodes = decoding.decode_all(state)
    steady = num_decodes == engine.num_running and decoding.all_sampled_before(state)
    budget = continue_prompts(state, engine.max_num_batched_tokens - num_decodes)
    num_admitted = admit_prompts(state, budget)
    return steady and num_admitted == 0 and state.steps[steps.current(state)].num_preempted == 0


@kernel
def continue_prompts(state: State, budget: int) -> int:
    """Spend the budget on prompts that are partly computed, in order; return the rest of it."""
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        if budget > 0 and decoding.has_prefill_left(state, slot):
            num_tokens = min(steps.tokens_of(state, slot) - state.requests[slot].computed_tokens, budget)
            steps.assign(state, slot, num_tokens)
            budget -= num_tokens
    return budget


@kernel
def admit_prompts(state: State, budget: int) -> int:
    """Admit from the head of the queue while seats, budget and blocks for whole prompts last; return the number."""
    engine = state.engine[0]
    num_admitted = 0
    while budget > 0 and engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, 0)
        num_tokens = steps.tokens_of(state, slot)
        if blocks.blocks_for(num_tokens, engine.block_size) > engine.num_free_blocks - engine.watermark_blocks:
            break
        queues.admit(state, 0, 0)
        blocks.allocate(state, slot, num_tokens)
        steps.assign(state, slot, min(num_tokens, budget))
        budget -= num_tokens
        num_admitted += 1
    return num_admitted
