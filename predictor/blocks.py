"""KV blocks: which requests hold them, their contents, and the order in which free blocks are reused.

Mirrors vLLM 0.32 `BlockPool` and `SingleTypeKVCacheManager` for one group of full-attention layers. Without prefix
caching only the number of free blocks matters, and blocks are only counted.
"""

from __future__ import annotations

import numpy as np

from predictor import two_ended_blocks
from predictor.compiled import kernel, small_kernel
from predictor.state import NO_CONTENT, NONE, TWO_ENDED_LAYOUT, State

OWN_CONTENTS = 1 << 20  # numbers of own contents per request: more than a request can hold blocks


@small_kernel
def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return (num_tokens + block_size - 1) // block_size


@small_kernel
def content_of(state: State, slot: int, position: int) -> int:
    """Return the content of the request's block at this position, once it is full."""
    request = state.requests[slot]
    if position < request.num_hashes:
        return state.hashes[slot, position]
    return -2 - (request.serial * OWN_CONTENTS + position)


@kernel
def find_hits(state: State, slot: int) -> int:
    """Count the leading blocks of a waiting request that are cached, and enter them into its table.

    The last token is always computed again: without it there is nothing to sample from. Where draft tokens are made
    from the hidden states of the tokens before them, so is the last block (`use_eagle_block_drop`).
    """
    if state.engine[0].plans_only:
        return known_hits(state, slot)
    if not state.engine[0].prefix_caching:
        return 0
    num_hits = cached_run(state, slot)
    return num_hits - 1 if state.engine[0].drops_last_hit and num_hits > 0 else num_hits


@kernel
def cached_run(state: State, slot: int) -> int:
    """Count the leading blocks of a waiting request that are cached, without its last token's, and enter them."""
    request = state.requests[slot]
    max_hits = (request.prompt_tokens + request.output_tokens - 1) // state.engine[0].block_size
    for position in range(max_hits):
        content = content_of(state, slot, position)
        if content >= 0:
            block = state.cached[content]
            if block == NONE:
                return position
            state.tables[slot, position] = block
        elif position >= request.full_blocks or state.blocks[state.tables[slot, position]].content != content:
            return position  # only this request can have had it, and its block was reused
    return max_hits


@small_kernel
def known_hits(state: State, slot: int) -> int:
    """Return how many hits the real engine has reported for a request; where it has not, ask for them in `pending`."""
    engine, request = state.engine[0], state.requests[slot]
    if request.num_hashes == NONE:
        request.num_hashes = request.full_blocks = 0
        state.pending[engine.num_pending] = slot
        engine.num_pending += 1
    return request.num_hashes


@kernel
def count_idle(state: State, slot: int, num_hits: int) -> int:
    """Count the hit blocks that no request holds: adopting them uses up free blocks."""
    if state.engine[0].plans_only:
        return state.requests[slot].full_blocks
    idle = 0
    for position in range(num_hits):
        if state.blocks[state.tables[slot, position]].num_refs == 0:
            idle += 1
    return idle


@kernel
def count_own(state: State, slot: int) -> int:
    """Count the blocks that a running request shares with no other: preempting it frees them."""
    request = state.requests[slot]
    if state.engine[0].plans_only:
        return request.full_blocks
    if not state.engine[0].prefix_caching:
        return request.num_blocks
    own = 0
    for position in range(request.num_blocks):
        if state.blocks[state.tables[slot, position]].num_refs == 1:
            own += 1
    return own


@kernel
def adopt_hits(state: State, slot: int, num_hits: int) -> None:
    """Give the request the cached blocks that `find_hits` has found."""
    engine = state.engine[0]
    for position in range(num_hits):
        index = state.tables[slot, position]
        block = state.blocks[index]
        if block.num_refs == 0:
            _unchain(state, index)
            engine.num_free_blocks -= 1
        block.num_refs += 1
    state.requests[slot].num_blocks = num_hits
    state.requests[slot].full_blocks = num_hits


@small_kernel
def has_room(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether the request's blocks hold `num_tokens` tokens; without a division, as it runs in every step."""
    return num_tokens <= state.requests[slot].num_blocks * state.engine[0].block_size


@small_kernel
def allocate(state: State, slot: int, num_tokens: int) -> None:
    """Allocate blocks for the request's first `num_tokens` tokens; enough blocks must be free."""
    if not has_room(state, slot, num_tokens):
        _take_free(state, slot, num_tokens)


@kernel
def _take_free(state: State, slot: int, num_tokens: int) -> None:
    engine, request = state.engine[0], state.requests[slot]
    needed = blocks_for(num_tokens, engine.block_size) - request.num_blocks
    engine.num_free_blocks -= needed
    if engine.prefix_caching:
        for position in range(request.num_blocks, request.num_blocks + needed):
            state.tables[slot, position] = _pop_free(state)
    request.num_blocks += needed


@small_kernel
def register_full(state: State, slot: int, num_tokens: int) -> None:
    """Register for prefix hits the request's blocks that `num_tokens` tokens fill.

    The last tokens may be computed again by a drafter with several modules (`num_reprefillable_tokens`).
    """
    engine = state.engine[0]
    if engine.num_prefill_lookahead_tokens > 1:
        num_tokens -= engine.num_prefill_lookahead_tokens - 1
    if fills_block(state, slot, num_tokens):
        _register(state, slot, num_tokens // engine.block_size)


@small_kernel
def fills_block(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether `num_tokens` tokens fill a block of the request that is not registered for prefix hits yet."""
    engine = state.engine[0]
    return engine.prefix_caching and num_tokens >= (state.requests[slot].full_blocks + 1) * engine.block_size


@kernel
def _register(state: State, slot: int, num_full: int) -> None:
    request = state.requests[slot]
    for position in range(request.full_blocks, num_full):
        index = state.tables[slot, position]
        content = content_of(state, slot, position)
        state.blocks[index].content = content
        if content >= 0:
            chain_same(state, index, content)
    request.full_blocks = num_full


@kernel
def share_full(state: State, slot: int, num_tokens: int) -> None:
    """Register the request's blocks that `num_tokens` tokens fill, as SGLang's radix tree does: each content once.

    A block whose content another block has already is freed, and the request holds the other one instead.
    """
    engine, request = state.engine[0], state.requests[slot]
    if not engine.prefix_caching or engine.plans_only:
        return
    num_full = min(num_tokens // engine.block_size, request.num_blocks)
    for position in range(request.full_blocks, num_full):
        index = state.tables[slot, position]
        content = content_of(state, slot, position)
        if content < 0 or state.cached[content] == NONE:
            state.blocks[index].content = content
            if content >= 0:
                chain_same(state, index, content)
            continue
        other = state.cached[content]
        state.blocks[index].num_refs = 0
        _prepend_free(state, index)
        engine.num_free_blocks += 1
        if state.blocks[other].num_refs == 0:
            _unchain(state, other)
            engine.num_free_blocks -= 1
        state.blocks[other].num_refs += 1
        state.tables[slot, position] = other
    request.full_blocks = max(request.full_blocks, num_full)


@kernel
def drop_cached(state: State, num_blocks: int) -> None:
    """Forget the contents of free blocks until `num_blocks` have none, those that are reused next first."""
    engine = state.engine[0]
    if not engine.prefix_caching:
        return
    index = engine.free_head
    for _ in range(num_blocks):
        if index == NONE:
            return
        block = state.blocks[index]
        if block.content >= 0:
            _unchain_same(state, index, block.content)
        block.content = NO_CONTENT
        index = block.next_free


@small_kernel
def release(state: State, slot: int) -> int:
    """Free all blocks of a request, the last one first: full blocks are reused last, the others first.

    They stay in the request's table, so that a preempted request finds those that are left when it resumes. Returns how
    many of the request's tokens were in host memory.
    """
    engine, request = state.engine[0], state.requests[slot]
    if engine.kv_layout == TWO_ENDED_LAYOUT:
        return two_ended_blocks.release(state, slot)
    if not engine.prefix_caching:
        engine.num_free_blocks += request.num_blocks
        request.num_blocks = 0
        return 0
    for position in range(request.num_blocks - 1, -1, -1):
        index = state.tables[slot, position]
        block = state.blocks[index]
        block.num_refs -= 1
        if block.num_refs == 0:
            engine.num_free_blocks += 1
            if position < request.full_blocks:  # also where its content is not known
                _append_free(state, index)
    for position in range(request.full_blocks, request.num_blocks):  # not full, so held by this request alone
        _prepend_free(state, state.tables[slot, position])
    request.num_blocks = 0
    return 0


@kernel
def _pop_free(state: State) -> int:
    engine = state.engine[0]
    index = engine.free_head
    block = state.blocks[index]
    engine.free_head = block.next_free
    if block.next_free == NONE:
        engine.free_tail = NONE
    else:
        state.blocks[block.next_free].previous_free = NONE
    if block.content >= 0:
        _unchain_same(state, index, block.content)
    block.content = NO_CONTENT
    block.num_refs = 1
    return index


@kernel
def _append_free(state: State, index: int) -> None:
    engine = state.engine[0]
    block = state.blocks[index]
    block.previous_free, block.next_free = engine.free_tail, NONE
    if engine.free_tail == NONE:
        engine.free_head = index
    else:
        state.blocks[engine.free_tail].next_free = index
    engine.free_tail = index


@kernel
def _prepend_free(state: State, index: int) -> None:
    engine = state.engine[0]
    block = state.blocks[index]
    block.previous_free, block.next_free = NONE, engine.free_head
    if engine.free_head == NONE:
        engine.free_tail = index
    else:
        state.blocks[engine.free_head].previous_free = index
    engine.free_head = index


@kernel
def _unchain(state: State, index: int) -> None:
    engine = state.engine[0]
    block = state.blocks[index]
    if block.previous_free == NONE:
        engine.free_head = block.next_free
    else:
        state.blocks[block.previous_free].next_free = block.next_free
    if block.next_free == NONE:
        engine.free_tail = block.previous_free
    else:
        state.blocks[block.next_free].previous_free = block.previous_free


@kernel
def chain_same(state: State, index: int, content: int) -> None:
    """Add a block to the list of those with the same shared content; the first of them is the one that is hit."""
    state.blocks[index].next_same = NONE
    last = state.cached[content]
    if last == NONE:
        state.cached[content] = index
        return
    while state.blocks[last].next_same != NONE:
        last = state.blocks[last].next_same
    state.blocks[last].next_same = index


@kernel
def chain_all(state: State, indexes: np.ndarray, contents: np.ndarray) -> None:
    """Set the shared contents of blocks."""
    for number in range(len(indexes)):
        state.blocks[indexes[number]].content = contents[number]
        chain_same(state, indexes[number], contents[number])


@kernel
def _unchain_same(state: State, index: int, content: int) -> None:
    after = state.blocks[index].next_same
    other = state.cached[content]
    if other == index:
        state.cached[content] = after
        return
    while state.blocks[other].next_same != index:
        other = state.blocks[other].next_same
    state.blocks[other].next_same = after
