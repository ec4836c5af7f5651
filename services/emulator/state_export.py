"""Compiled code that copies the emulated engine's state into the arrays of its state file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from predictor import remote_kv
from predictor.compiled import direct, kernel
from predictor.state import FINISHED, HELD, LOST, MEMORY_SIZE, NONE, State


class Copies(NamedTuple):
    """The arrays that the state is copied to; without `blocks` contents are not exported."""

    state: np.ndarray  # this and the next seven are arrays of the file
    clients: np.ndarray
    adapters: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    held: np.ndarray
    live: np.ndarray
    blocks: np.ndarray
    tables: np.ndarray  # blocks of each slot that the file has already
    new_hashes: np.ndarray  # by slot, the number of blocks with known tokens so far, NONE where nothing is new
    new_blocks: np.ndarray  # by slot, the first changed entry of its table, or NONE


@kernel
def _copy(state: State, into: Copies, hash_of: np.ndarray) -> None:
    """Copy everything but the steps under way; `hash_of` has the hashes of contents by number."""
    head, out = state.engine[0], into.state[0]
    out.num_running = head.num_running
    out.num_waiting = head.num_waiting
    out.num_in_flight = head.num_in_flight
    out.num_blocks = head.num_blocks
    out.num_free_blocks = head.num_free_blocks
    out.decodes_since_look = head.decodes_since_look
    out.num_planned = head.num_steps
    out.num_preemptions = head.num_preemptions
    _copy_memory(state, into)
    out.num_adapters = head.num_adapters
    for place in range(head.num_adapters):
        into.adapters[place].number = state.adapters[place].number
        into.adapters[place].is_active = state.adapters[place].is_active
    for place in range(head.num_running):
        into.running[place] = state.running[place]
    for place in range(head.num_waiting):
        into.waiting[place] = state.waiting[(head.waiting_head + place) % len(state.waiting)]
    _copy_held(state, into)
    for slot in range(len(into.live)):
        _copy_request(state, into, slot)
    if len(into.blocks) > 0:
        _copy_blocks(state, into, hash_of)


@kernel
def _copy_memory(state: State, into: Copies) -> None:
    """Copy what the local scheduler remembers."""
    head, out = state.engine[0], into.state[0]
    out.correction = head.correction
    for index in range(MEMORY_SIZE):
        out.memory[index] = head.memory[index]
    out.num_clients = head.num_clients
    for index in range(head.num_clients):
        client, row = state.clients[index], into.clients[index]
        row.tenant, row.weight, row.tokens, row.waits = client.tenant, client.weight, client.tokens, client.waits


@kernel
def _copy_held(state: State, into: Copies) -> None:
    """Copy which requests have ended while their blocks are held, or still written to."""
    num_held = 0
    for place in range(state.engine[0].num_transfers):
        slot = state.transfers[place]
        if state.requests[slot].status == FINISHED:
            into.held[num_held] = slot
            num_held += 1
    into.state[0].num_held = num_held


@kernel
def _copy_transfer(state: State, into: Copies, slot: int) -> None:
    """Copy where the transfer of a request's blocks stands, and note when its fetch started and ended."""
    row, live = state.requests[slot], into.live[slot]
    has_started = remote_kv.is_under_way(live.stage)
    live.stage = row.stage
    if row.stage == HELD:
        live.held_until_s = row.transfer_s
    elif remote_kv.is_under_way(row.stage):
        if not has_started:
            live.fetch_started_s = state.engine[0].now_s
            if state.engine[0].num_in_flight > 1:  # it starts with the younger step
                live.fetch_started_s = max(live.fetch_started_s, state.steps[state.engine[0].oldest].end_s)
        if row.stage == LOST:
            live.fetch_started_s = NONE
        if row.status == FINISHED:
            live.held_until_s = remote_kv.end_at_present_rate_s(state, slot)
    elif has_started and live.fetch_ended_s < 0:
        live.fetch_ended_s = row.transfer_s


@kernel
def _copy_request(state: State, into: Copies, slot: int) -> None:
    """Copy a slot, and note which of its blocks the file does not have yet."""
    row, live = state.requests[slot], into.live[slot]
    live.output_tokens = row.output_tokens
    live.computed_tokens = row.computed_tokens
    live.placeholders = row.placeholders
    live.in_flight_tokens = row.in_flight_tokens
    live.stale_tokens = row.stale_tokens
    live.num_blocks = row.num_blocks
    live.full_blocks = row.full_blocks
    live.num_preemptions = row.num_preemptions
    live.hit_tokens = row.hit_tokens
    live.prefill_tokens = row.prefill_tokens
    live.draft_tokens = row.draft_tokens
    live.scheduled_s = row.scheduled_s
    live.first_token_s = row.first_token_s
    _copy_transfer(state, into, slot)
    into.new_hashes[slot] = into.new_blocks[slot] = NONE
    if len(into.blocks) == 0 or live.serial == 0:
        live.num_hashes = 0
        return
    # only blocks whose tokens exist: a real engine does not know future tokens
    known = min((row.prompt_tokens + row.output_tokens) // state.engine[0].block_size, row.num_hashes)
    if known > live.num_hashes:
        into.new_hashes[slot] = live.num_hashes
    live.num_hashes = known
    for place in range(max(row.num_blocks, row.full_blocks)):
        block = state.tables[slot, place]
        if into.tables[slot, place] != block:
            into.tables[slot, place] = block
            if into.new_blocks[slot] == NONE:
                into.new_blocks[slot] = place


@kernel
def _copy_blocks(state: State, into: Copies, hash_of: np.ndarray) -> None:
    """Copy the content of each block, and number the free ones from 1 in the order of reuse."""
    for block in range(len(into.blocks)):
        content = state.blocks[block].content
        into.blocks[block].content = into.blocks[block].reuse = 0
        if content >= 0:
            into.blocks[block].content = hash_of[content]  # with the 0 in one expression it would be a float
    rank, block = 0, state.engine[0].free_head
    while block != NONE:
        rank += 1
        into.blocks[block].reuse = rank
        block = state.blocks[block].next_free


export_state = direct(_copy)
