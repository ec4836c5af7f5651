"""Admission by reservation: a request is admitted when there are blocks for its longest possible response."""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.compiled import kernel
from predictor.state import State


@kernel
def admit_reserved(state: State, budget: int) -> int:
    """Admit whole prompts from the head of the queue while seats, blocks and the token budget last; return the number.

    A prompt longer than the budget is admitted alone.
    """
    engine = state.engine[0]
    num_admitted = 0
    while engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, 0)
        request = state.requests[slot]
        longest = min(request.prompt_tokens + request.max_tokens, engine.max_model_len)
        if blocks.blocks_for(longest, engine.block_size) > engine.num_free_blocks:
            break
        if request.prompt_tokens > budget and num_admitted > 0:
            break
        queues.admit(state, 0, 0)
        blocks.allocate(state, slot, longest)
        steps.assign(state, slot, request.prompt_tokens)
        budget -= request.prompt_tokens
        num_admitted += 1
    return num_admitted
