"""LightLLM with the past-future scheduler: prefills run apart from decodes, and enter if the future memory peak fits.

The peak follows from predicted response lengths (arXiv 2507.10150, §3): when a request ends, each request that runs
longer has grown by the number of tokens that the ending one still had to produce.
"""

from __future__ import annotations

from predictor import blocks, queues, steps
from predictor.batching import decoding
from predictor.compiled import kernel
from predictor.state import State

DECODES_BETWEEN_LOOKS = 10  # after which LightLLM's router checks the queue
OVERDUE_TOKENS = 10  # the predicted rest of a response that is longer than predicted


@kernel
def schedule(state: State) -> bool:
    """Check the queue when it is due, and prefill the requests that can be admitted; else decode."""
    engine = state.engine[0]
    if engine.decodes_since_look > DECODES_BETWEEN_LOOKS:  # repeated decodes are counted without checks
        engine.decodes_since_look = (engine.decodes_since_look - 1) % DECODES_BETWEEN_LOOKS + 1
    if engine.num_running == 0 or engine.decodes_since_look == DECODES_BETWEEN_LOOKS:
        engine.decodes_since_look = 0
        if admit_by_peak(state) > 0:
            return False
    decoding.decode_all(state)
    engine.decodes_since_look += 1
    is_queue_settled = engine.num_waiting == 0 or engine.num_running >= engine.max_num_seqs
    return is_queue_settled and decoding.all_sampled_before(state)


@kernel
def admit_by_peak(state: State) -> int:
    """Admit whole prompts from the head of the queue while the future memory peak fits into the pool."""
    engine = state.engine[0]
    budget = engine.max_num_batched_tokens
    num_admitted = 0
    while engine.num_waiting > 0 and engine.num_running < engine.max_num_seqs:
        slot = queues.waiting_at(state, 0)
        num_tokens = steps.tokens_of(state, slot)
        if num_tokens > budget and num_admitted > 0:
            break
        if blocks.blocks_for(num_tokens, engine.block_size) > engine.num_free_blocks:
            break
        if engine.num_running > 0 and peak_blocks(state, slot) > engine.num_blocks:
            break
        queues.admit(state, 0, 0)
        blocks.allocate(state, slot, num_tokens)
        steps.assign(state, slot, num_tokens)
        budget -= num_tokens
        num_admitted += 1
    return num_admitted


@kernel
def peak_blocks(state: State, candidate: int) -> int:
    """Return the largest number of blocks that the running requests and a candidate will hold, by predicted lengths."""
    engine = state.engine[0]
    order = state.turns  # by remaining tokens, descending
    for count in range(engine.num_running + 1):
        slot = candidate if count == engine.num_running else state.running[count]
        rank = count
        while rank > 0 and tokens_left(state, order[rank - 1]) < tokens_left(state, slot):
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = slot
    peak = 0
    for last in range(engine.num_running + 1):
        ahead = tokens_left(state, order[last])
        held = 0
        for rank in range(last + 1):
            held += blocks.blocks_for(steps.tokens_of(state, order[rank]) + ahead, engine.block_size)
        peak = max(peak, held)
    return peak


@kernel
def tokens_left(state: State, slot: int) -> int:
    """Return the number of tokens that a request is still predicted to produce."""
    left = state.requests[slot].expected_tokens - state.requests[slot].output_tokens
    return left if left > 0 else OVERDUE_TOKENS
