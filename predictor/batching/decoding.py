"""Decoding as engines do it that plan prefills apart: one token for each running request, the youngest giving way."""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.compiled import kernel
from predictor.state import State


@kernel
def has_prefill_left(state: State, slot: int) -> bool:
    """Tell whether a request still computes what it was admitted with."""
    return state.requests[slot].computed_tokens < state.requests[slot].prefill_tokens


@kernel
def decode_all(state: State) -> int:
    """Give every running request past its prefill one token; preempt from the end of the list until blocks suffice.

    Returns how many decode.
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
    """Preempt from the end of the list until a decode of this request has blocks; False when it had to go itself."""
    engine, request = state.engine[0], state.requests[slot]
    needed = blocks.blocks_for(request.computed_tokens + 1, engine.block_size) - request.num_blocks
    while engine.num_free_blocks < max(needed, engine.decode_reserve):
        if queues.preempt(state, engine.num_running - 1) == slot:
            return False
    return True


@kernel
def all_sampled_before(state: State) -> bool:
    """Tell whether every running request has its first token: a step of decodes alone then repeats itself."""
    for position in range(state.engine[0].num_running):
        if state.requests[state.running[position]].output_tokens == 0:
            return False
    return True
