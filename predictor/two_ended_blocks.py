"""KV blocks that a real-time request fills from the left and a best-effort request from the right (BROS §5).

The left may take the place of the right's tokens, which are then checkpointed: only they are copied to host memory.
They come back when their request is served: to their block as far as it has empty slots, else to other blocks. A
request's tokens are in the blocks of which it has a side; their order has no effect on the model.
"""

from __future__ import annotations

from predictor.compiled import kernel, small_kernel
from predictor.state import NONE, State


@small_kernel
def empty_slots(state: State, index: int) -> int:
    """Return the slots of a block in which no token is."""
    block = state.two_ended_blocks[index]
    return state.engine[0].block_size - block.left_tokens - block.right_tokens + block.checkpointed


@small_kernel
def clear_left(state: State, index: int) -> None:
    """Remove the real-time request from a block."""
    block = state.two_ended_blocks[index]
    block.left, block.left_tokens = NONE, 0
    if block.right == NONE:
        state.engine[0].num_free_blocks += 1


@small_kernel
def clear_right(state: State, index: int) -> None:
    """Remove the best-effort request from a block."""
    block = state.two_ended_blocks[index]
    block.right, block.right_tokens, block.checkpointed = NONE, 0, 0
    if block.left == NONE:
        state.engine[0].num_free_blocks += 1


@kernel
def release(state: State, slot: int) -> int:
    """Remove a request from all its blocks; return how many of its tokens were in host memory."""
    checkpointed = 0
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.left == slot:
            clear_left(state, index)
        if block.right == slot:
            checkpointed += block.checkpointed
            clear_right(state, index)
    state.requests[slot].num_blocks = 0
    return checkpointed


@kernel
def add_checkpointed(state: State) -> None:
    """Add each running request's tokens in host memory to the key of its rank."""
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.checkpointed > 0:
            state.ranks[block.right].key += block.checkpointed


@kernel
def fits_left(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether there is room for this many more tokens of a real-time request."""
    size = state.engine[0].block_size
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.left == slot:
            num_tokens -= size - block.left_tokens
        elif block.left == NONE:
            num_tokens -= size
        if num_tokens <= 0:
            return True
    return False


@kernel
def fits_right(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether there is room for this many tokens of a best-effort request, those in host memory among them."""
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.right == slot or block.right == NONE:  # noqa: PLR1714 - a compiled tuple has one type
            num_tokens -= empty_slots(state, index)
            if num_tokens <= 0:
                return True
    return False


@kernel
def grow_left(state: State, slot: int, num_tokens: int) -> None:
    """Place tokens of a real-time request: in its own blocks, then in those with the most empty slots."""
    size = state.engine[0].block_size
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.left == slot and block.left_tokens < size:
            num_tokens -= put_left(state, index, num_tokens)
    while num_tokens > 0:
        emptiest, most = NONE, -1
        for index in range(state.engine[0].num_blocks):
            if state.two_ended_blocks[index].left == NONE and empty_slots(state, index) > most:
                emptiest, most = index, empty_slots(state, index)
                if most == size:
                    break
        take_side(state, slot, emptiest)
        state.two_ended_blocks[emptiest].left = slot
        num_tokens -= put_left(state, emptiest, num_tokens)


@kernel
def put_left(state: State, index: int, num_tokens: int) -> int:
    """Fill a block from the left, over tokens of the right where no slot is empty; return the number of tokens."""
    size = state.engine[0].block_size
    block = state.two_ended_blocks[index]
    count = min(num_tokens, size - block.left_tokens)
    block.left_tokens += count
    overwritten = -empty_slots(state, index)
    if overwritten > 0:
        block.checkpointed += overwritten
        count_swapped(state, overwritten)
    return count


@kernel
def take_back_left(state: State, slot: int) -> None:
    """Remove one token of a real-time request, which was placed for a step that leaves it out."""
    size, last = state.engine[0].block_size, NONE
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.left == slot and (last == NONE or block.left_tokens < size):
            last = index
    state.two_ended_blocks[last].left_tokens -= 1
    if state.two_ended_blocks[last].left_tokens == 0:
        clear_left(state, last)
        state.requests[slot].num_blocks -= 1


@kernel
def grow_right(state: State, slot: int, num_tokens: int) -> None:
    """Place tokens of a best-effort request, and those of its tokens that are in host memory."""
    size = state.engine[0].block_size
    num_tokens += bring_back(state, slot)
    for index in range(state.engine[0].num_blocks):
        if num_tokens > 0 and state.two_ended_blocks[index].right == slot:
            num_tokens -= put_right(state, index, num_tokens)
    while num_tokens > 0:
        emptiest, most = NONE, 0
        for index in range(state.engine[0].num_blocks):
            if state.two_ended_blocks[index].right == NONE and empty_slots(state, index) > most:
                emptiest, most = index, empty_slots(state, index)
                if most == size:
                    break
        take_side(state, slot, emptiest)
        state.two_ended_blocks[emptiest].right = slot
        num_tokens -= put_right(state, emptiest, num_tokens)


@small_kernel
def put_right(state: State, index: int, num_tokens: int) -> int:
    """Fill a block's empty slots from the right; return the number of tokens."""
    count = min(num_tokens, empty_slots(state, index))
    state.two_ended_blocks[index].right_tokens += count
    return count


@kernel
def bring_back(state: State, slot: int) -> int:
    """Copy a request's tokens back from host memory; return how many have to go to other slots than before."""
    moved = 0
    for index in range(state.engine[0].num_blocks):
        block = state.two_ended_blocks[index]
        if block.right == slot and block.checkpointed > 0:
            count_swapped(state, block.checkpointed)
            block.checkpointed -= min(block.checkpointed, empty_slots(state, index))
            moved += block.checkpointed
            block.right_tokens -= block.checkpointed
            block.checkpointed = 0
            if block.right_tokens == 0:
                clear_right(state, index)
                state.requests[slot].num_blocks -= 1
    return moved


@small_kernel
def count_swapped(state: State, num_tokens: int) -> None:
    """Count tokens that the planned step copies to host memory, or back."""
    engine = state.engine[0]
    state.steps[(engine.oldest + engine.num_in_flight) % 2].num_swapped += num_tokens


@small_kernel
def take_side(state: State, slot: int, index: int) -> None:
    """Count a block that gets a further side, before its request is entered."""
    block = state.two_ended_blocks[index]
    if block.left == NONE and block.right == NONE:
        state.engine[0].num_free_blocks -= 1
    state.requests[slot].num_blocks += 1
