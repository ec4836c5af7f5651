"""Decoding in engines that schedule prefills separately: a token per running request, the last one is preempted."""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.compiled import kernel
from predictor.state import State


@kernel
def has_prefill_left(state: State, slot: int) -> bool:
    """Return whether a request has not finished its prefill."""
    return state.requests[slot].computed_tokens < state.requests[slot].prefill_tokens


@kernel
def decode_all(state: State) -> int:
    """Schedule a token of each running request that has finished its prefill; preempt the last ones to free blocks.

    Returns the number of requests that decode.
    """
    num_decodes = 0
    position = 0
    while position < state.engine[0].num_running:
        slot = state.running[position]
        if not has_prefill_left(state, slot):
            if not make_room(state, slot):
                return num_decodes
            blocks.allocate(state, slot, state.requests[slot].computed_tokens + 1)
            steps.assign(state, slot, 1)
            num_decodes += 1
        position += 1
    return num_decodes


@kernel
def make_room(state: State, slot: int) -> bool:
    """Preempt the last running requests until this one can decode; return False where it was preempted itself."""
    engine, request = state.engine[0], state.requests[slot]
    needed = blocks.blocks_for(request.computed_tokens + 1, engine.block_size) - request.num_blocks
    while engine.num_free_blocks < max(needed, engine.decode_reserve):
        if queues.preempt(state, engine.num_running - 1) == slot:
            return False
    return True


@kernel
def all_sampled_before(state: State) -> bool:
    """Return whether every running request has its first token: a step of decodes alone then repeats itself."""
    for position in range(state.engine[0].num_running):
        if state.requests[state.running[position]].output_tokens == 0:
            return False
    return True
