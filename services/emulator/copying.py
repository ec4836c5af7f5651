"""From the engine model's arrays to those of a state file, in one sweep: it is made at every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from predictor.compiled import direct, kernel
from predictor.state import NOBODY, State


class Copies(NamedTuple):
    """Where the state is copied to; without `blocks` nothing is told of what blocks hold."""

    state: np.ndarray  # these as in the file
    running: np.ndarray
    waiting: np.ndarray
    live: np.ndarray
    blocks: np.ndarray
    tables: np.ndarray  # blocks of each slot, as the file has them already
    new_hashes: np.ndarray  # by slot, how many blocks had known tokens before, NOBODY where nothing is new
    new_blocks: np.ndarray  # by slot, the first place where its table is another than it was, or NOBODY


@kernel
def _copy(state: State, into: Copies, hash_of: np.ndarray) -> None:
    """Copy everything but the steps under way; `hash_of` spells the numbers of contents out."""
    head, out = state.engine[0], into.state[0]
    out.num_running = head.num_running
    out.num_waiting = head.num_waiting
    out.num_in_flight = head.num_in_flight
    out.num_blocks = head.num_blocks
    out.num_free_blocks = head.num_free_blocks
    out.decodes_since_look = head.decodes_since_look
    out.num_planned = head.num_steps
    out.num_preemptions = head.num_preemptions
    for place in range(head.num_running):
        into.running[place] = state.running[place]
    for place in range(head.num_waiting):
        into.waiting[place] = state.waiting[(head.waiting_head + place) % len(state.waiting)]
    for slot in range(len(into.live)):
        _copy_request(state, into, slot)
    if len(into.blocks) > 0:
        _copy_blocks(state, into, hash_of)


@kernel
def _copy_request(state: State, into: Copies, slot: int) -> None:
    """Copy a slot, and note what of its blocks the file does not have yet."""
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
    live.scheduled_s = row.scheduled_s
    live.first_token_s = row.first_token_s
    into.new_hashes[slot] = into.new_blocks[slot] = NOBODY
    if len(into.blocks) == 0 or live.serial == 0:
        live.num_hashes = 0
        return
    # of an answer's blocks those whose tokens are there: a real engine does not know the others ahead
    known = min((row.prompt_tokens + row.output_tokens) // state.engine[0].block_size, row.num_hashes)
    if known > live.num_hashes:
        into.new_hashes[slot] = live.num_hashes
    live.num_hashes = known
    for place in range(max(row.num_blocks, row.full_blocks)):
        block = state.tables[slot, place]
        if into.tables[slot, place] != block:
            into.tables[slot, place] = block
            if into.new_blocks[slot] == NOBODY:
                into.new_blocks[slot] = place


@kernel
def _copy_blocks(state: State, into: Copies, hash_of: np.ndarray) -> None:
    """Tell what each block holds, and number the free ones from 1 up in the order of reuse."""
    for block in range(len(into.blocks)):
        content = state.blocks[block].content
        into.blocks[block].content = into.blocks[block].reuse = 0
        if content >= 0:
            into.blocks[block].content = hash_of[content]  # (in one expression with the 0 it would become a float)
    rank, block = 0, state.engine[0].free_head
    while block != NOBODY:
        rank += 1
        into.blocks[block].reuse = rank
        block = state.blocks[block].next_free


copy = direct(_copy)
