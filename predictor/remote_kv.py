"""KV blocks that are fetched from another engine, or held until another engine has fetched them.

Mirrors vLLM 0.32 `Scheduler` with a KV connector that loads asynchronously (NIXL): a transfer starts with the step in
which its request gets blocks, and the scheduler knows its end after the first step that ends later. Between transfers
that share a link, its bandwidth is divided equally: each gets the same work per second, `link_s` in total so far.
"""

from __future__ import annotations

import numpy as np

from predictor import blocks
from predictor.compiled import kernel, small_kernel
from predictor.state import (
    ARRIVED,
    FETCH_FAILED,
    FETCHED,
    FETCHING,
    FINISHED,
    HELD,
    LOST,
    NO_TRANSFER,
    State,
)


@kernel
def start_fetch(state: State, slot: int, num_tokens: int, num_blocks: int) -> None:
    """Start to fetch blocks of a request, with the step that is being planned."""
    engine, request = state.engine[0], state.requests[slot]
    start_s = engine.now_s
    if engine.num_in_flight > 0:
        start_s = max(start_s, state.steps[engine.oldest].end_s)
    seconds = request.transfer_s
    if np.isnan(seconds):
        seconds = fetch_seconds(engine, num_tokens, num_blocks)
    request.stage = FETCHING
    if engine.transfer_shared:
        advance_link(engine, engine.now_s)
        request.transfer_s = engine.link_s + start_s - engine.now_s + seconds
    else:
        request.transfer_s = start_s + seconds
    engine.num_fetching += 1
    add_transfer(state, slot)


@small_kernel
def fetch_seconds(engine: np.record, num_tokens: int, num_blocks: int) -> float:
    """Return how long blocks take to be fetched, if no other transfer shares the link."""
    seconds = engine.transfer_base_s + num_tokens * engine.transfer_token_s + num_blocks * engine.transfer_block_s
    return engine.transfer_pace * seconds


@small_kernel
def missing_seconds(state: State, slot: int) -> float:
    """Return how long the blocks of a request take to be fetched that were not cached."""
    engine, request = state.engine[0], state.requests[slot]
    num_hits = request.hit_tokens // engine.block_size
    return fetch_seconds(engine, request.prompt_tokens - request.hit_tokens, request.num_blocks - num_hits)


@kernel
def hold(state: State, slot: int) -> None:
    """Hold the blocks of a request whose prefill has just ended."""
    engine, request = state.engine[0], state.requests[slot]
    request.stage = HELD
    request.transfer_s += engine.now_s
    add_transfer(state, slot)


@small_kernel
def add_transfer(state: State, slot: int) -> None:
    """Add a transfer to the list."""
    engine = state.engine[0]
    state.transfers[engine.num_transfers] = slot
    engine.num_transfers += 1
    find_next(state)


@small_kernel
def advance_link(engine: np.record, now_s: float) -> None:
    """Count the work that each transfer has got until now."""
    if engine.num_fetching > 0 and now_s > engine.link_at_s:
        engine.link_s += (now_s - engine.link_at_s) / engine.num_fetching
    engine.link_at_s = max(engine.link_at_s, now_s)


@small_kernel
def end_at_present_rate_s(state: State, slot: int) -> float:
    """Return when a transfer ends, if no other one starts or ends before: the first one to end does so then."""
    engine, request = state.engine[0], state.requests[slot]
    if request.stage == FETCHING and engine.transfer_shared:
        return engine.link_at_s + max(0.0, request.transfer_s - engine.link_s) * engine.num_fetching
    return request.transfer_s


@kernel
def fetch_end_s(state: State, slot: int) -> float:
    """Return when a fetch that has started ends, or has ended, if no other one starts.

    The fetches that end before it leave their share of the link to it.
    """
    engine, request = state.engine[0], state.requests[slot]
    mine_s = request.transfer_s
    if request.stage != FETCHING or not engine.transfer_shared:
        return float(mine_s)
    end_s, link_s = engine.link_at_s, engine.link_s
    while True:
        next_s, num_fetching = mine_s, 0
        for position in range(engine.num_transfers):
            other = state.requests[state.transfers[position]]
            if other.stage == FETCHING and other.transfer_s > link_s:
                num_fetching += 1
                next_s = min(next_s, other.transfer_s)
        end_s += max(0.0, next_s - link_s) * num_fetching
        if next_s >= mine_s:
            return float(end_s)
        link_s = next_s


@kernel
def find_next(state: State) -> None:
    """Find out when the next transfer ends."""
    engine = state.engine[0]
    engine.next_transfer_s = np.inf
    for position in range(engine.num_transfers):
        engine.next_transfer_s = min(engine.next_transfer_s, end_at_present_rate_s(state, state.transfers[position]))


@small_kernel
def absorb_transfers(state: State) -> None:
    """End every transfer whose end has come."""
    if state.engine[0].next_transfer_s <= state.engine[0].now_s:
        _absorb(state)


@kernel
def _absorb(state: State) -> None:
    engine = state.engine[0]
    while engine.next_transfer_s <= engine.now_s:
        for position in range(engine.num_transfers):
            slot = state.transfers[position]
            if end_at_present_rate_s(state, slot) <= engine.next_transfer_s:
                end_transfer(state, slot, engine.next_transfer_s)
                break


@kernel
def end_transfer(state: State, slot: int, at_s: float) -> None:
    """End a transfer at a time: the blocks have been fetched, or are held no longer."""
    engine, request = state.engine[0], state.requests[slot]
    _remove(state, slot)
    if request.stage == FETCHING:
        leave_link(engine, at_s)
    request.stage = FETCH_FAILED if request.stage == LOST else FETCHED
    request.transfer_s = at_s
    if request.status == FINISHED:  # its prefill, or it was aborted meanwhile
        request.stage = NO_TRANSFER
        blocks.release(state, slot)
    find_next(state)
    engine.steady = engine.stuck = 0


@small_kernel
def leave_link(engine: np.record, at_s: float) -> None:
    """End the use of the link by one transfer."""
    advance_link(engine, at_s)
    engine.num_fetching -= 1


@small_kernel
def is_under_way(stage: int) -> bool:
    """Return whether, as far as the engine knows, blocks are being fetched."""
    return stage in (FETCHING, ARRIVED, LOST)


@kernel
def set_end(state: State, slot: int, at_s: float) -> None:
    """Change when a transfer ends; a fetch gets as much work from its link as it needs until then."""
    engine, request = state.engine[0], state.requests[slot]
    request.transfer_s = at_s
    if request.stage == FETCHING and engine.transfer_shared:
        request.transfer_s = engine.link_s + max(0.0, at_s - engine.link_at_s) / engine.num_fetching
    find_next(state)


@kernel
def _remove(state: State, slot: int) -> None:
    engine = state.engine[0]
    kept = 0
    for position in range(engine.num_transfers):
        if state.transfers[position] != slot:
            state.transfers[kept] = state.transfers[position]
            kept += 1
    engine.num_transfers = kept


@kernel
def end_fetch(state: State, slot: int, at_s: float, arrived: bool, valid_tokens: int) -> None:
    """End a fetch at a time, at which the engine has to know; of one that failed, `valid_tokens` have arrived."""
    leave_link(state.engine[0], at_s)
    request = state.requests[slot]
    request.stage = ARRIVED if arrived else LOST
    request.transfer_s = at_s
    if not arrived:
        request.computed_tokens = valid_tokens
    find_next(state)


@kernel
def promote(state: State, slot: int) -> None:
    """Make a request schedulable whose fetch has ended: its last token, or what did not arrive, is computed here.

    Mirrors `Scheduler._update_waiting_for_remote_kv`.
    """
    request = state.requests[slot]
    if request.stage == FETCH_FAILED and request.computed_tokens == 0:
        blocks.release(state, slot)
    else:
        blocks.register_full(state, slot, request.computed_tokens)
    request.computed_tokens = min(request.computed_tokens, request.prompt_tokens + request.output_tokens - 1)
    request.stage = NO_TRANSFER


@kernel
def reserved_blocks(state: State) -> int:
    """Return the blocks that prefills under way still need: a fetch leaves them free, so that both can end.

    Mirrors `Scheduler._inflight_prefill_reserved_blocks`: a failed fetch counts as a prefill from then on.
    """
    engine = state.engine[0]
    total = 0
    for position in range(engine.num_running):
        slot = state.running[position]
        if state.requests[slot].computed_tokens < state.requests[slot].prefill_tokens:
            total += missing_blocks(state, slot)
    for position in range(engine.num_holding if engine.holding_first else engine.num_waiting):
        index = engine.waiting_head + position
        slot = state.waiting[index - len(state.waiting) if index >= len(state.waiting) else index]
        if state.requests[slot].stage == NO_TRANSFER and state.requests[slot].num_blocks > 0:
            total += missing_blocks(state, slot)
    return total


@small_kernel
def missing_blocks(state: State, slot: int) -> int:
    """Return how many blocks a request needs for its known tokens, beyond those that it has."""
    request = state.requests[slot]
    num_tokens = min(request.prompt_tokens + request.output_tokens, state.engine[0].max_model_len)
    return max(0, blocks.blocks_for(num_tokens, state.engine[0].block_size) - request.num_blocks)


@small_kernel
def takes_seat(state: State, slot: int) -> bool:
    """Return whether a waiting request will run once it is admitted: it need not, or cannot, fetch first."""
    stage = state.requests[slot].stage
    return stage in (NO_TRANSFER, FETCHED, FETCH_FAILED)
