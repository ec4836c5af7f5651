"""Copies of an engine's state, for simulations that leave the engine as it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor.compiled import interpreted, kernel, small_kernel
from predictor.state import BLOCK, NO_CONTENT, NONE, REQUEST, TWO_ENDED_LAYOUT, State
from predictor.tabulated_costs import Costs

REQUEST_WORDS = REQUEST.itemsize // 8
BLOCK_WORDS = BLOCK.itemsize // 8
NUM_WRITTEN = State._fields.index("facts")  # the loop writes the arrays before this one, and only reads the others


def stack_like(state: State, depth: int) -> State:
    """Allocate `depth` copies of a state, without any block cached; `layer` returns one of them."""
    own: list[Any] = []
    for array in state[:NUM_WRITTEN]:
        assert isinstance(array, np.ndarray)
        own.append(np.zeros((depth, *array.shape), array.dtype).view(type(array)))
    stack = State(*own, *state[NUM_WRITTEN:])
    stack.blocks.content = NO_CONTENT
    stack.cached[:] = NONE
    return stack


@kernel
def layer(stack: State, source: State, index: int) -> State:
    """Return one copy of a stack; it shares with the source the arrays that the loop only reads."""
    return layer_with(stack, index, source.facts, source.hashes, source.expected_accepted, source.costs)


def interpreted_layer(stack: State, source: State, index: int) -> State:
    """Return one copy of a stack to a caller in Python: kernels cannot return arrays to it."""
    make = interpreted(layer_with)
    return make(stack, index, source.facts, source.hashes, source.expected_accepted, source.costs)


@small_kernel
def layer_with(
    stack: State, index: int, facts: Any, hashes: np.ndarray, expected_accepted: np.ndarray, costs: Costs
) -> State:
    """Return one engine of a stack, with these arrays as those that the loop only reads."""
    return State(
        stack.engine[index], stack.requests[index], stack.running[index], stack.waiting[index], stack.pending[index],
        stack.transfers[index], stack.preempted[index], stack.steps[index], stack.batch[index],
        stack.turn_starts[index], stack.turns[index], stack.ranks[index], stack.clients[index],
        stack.two_ended_blocks[index], stack.blocks[index], stack.tables[index], stack.cached[index],
        stack.adapters[index], stack.step_adapters[index], stack.encoder_cache[index], stack.encoder_inputs[index],
        facts, hashes, expected_accepted, costs,
    )  # fmt: skip


@kernel
def copy_into(target: State, source: State) -> None:
    """Copy a state into another of the same shape; requests that have ended are left out."""
    copy_requests(target, source)
    copy_blocks(target, source)


@kernel
def copy_requests(target: State, source: State) -> None:
    """Copy all of a state but the contents of its blocks; requests that have ended are left out."""
    target.engine[0] = source.engine[0]
    engine = source.engine[0]
    for position in range(engine.num_running):
        target.running[position] = source.running[position]
        _copy_request(target, source, source.running[position])
    _copy_ring(target, source, target.waiting, source.waiting, engine.waiting_head, engine.num_waiting)
    _copy_ring(target, source, target.pending, source.pending, engine.pending_head, engine.num_pending)
    for position in range(engine.num_transfers):
        target.transfers[position] = source.transfers[position]
        _copy_request(target, source, source.transfers[position])
    for ahead in range(engine.num_in_flight):
        index = (engine.oldest + ahead) % 2
        target.steps[index] = source.steps[index]
        for position in range(source.steps[index].num_scheduled):
            target.batch[index, position] = source.batch[index, position]
            _copy_request(target, source, source.batch[index, position].slot)
    for client in range(engine.num_clients):
        target.clients[client] = source.clients[client]
    for adapter in range(engine.num_adapters):
        target.adapters[adapter] = source.adapters[adapter]
    for entry in range(engine.num_encoder_entries):
        target.encoder_cache[entry] = source.encoder_cache[entry]
    if engine.kv_layout == TWO_ENDED_LAYOUT:
        for block in range(engine.num_blocks):
            target.two_ended_blocks[block] = source.two_ended_blocks[block]


@kernel
def copy_blocks(target: State, source: State) -> None:
    """Copy the blocks that differ, with prefix caching, and where their contents are found.

    Both states have an index of contents that belongs to their blocks. The first block with a content is another one
    only where a block with this content differs in it, or in which block is the next one with the same.
    """
    if not source.engine[0].prefix_caching:
        return
    to, words = target.blocks.view(np.int64), source.blocks.view(np.int64)
    for block in range(len(source.blocks)):
        first = block * BLOCK_WORDS
        differences = 0
        for word in range(first, first + BLOCK_WORDS):
            differences |= to[word] ^ words[word]
        if differences == 0:
            continue
        replaced, content = target.blocks[block].content, source.blocks[block].content
        _copy_words(to, words, first, BLOCK_WORDS)
        if replaced >= 0:
            target.cached[replaced] = source.cached[replaced]
        if content >= 0:
            target.cached[content] = source.cached[content]


@small_kernel
def _copy_words(to: np.ndarray, words: np.ndarray, first: int, count: int) -> None:
    """Copy records word by word: compiled code would copy whole records byte by byte."""
    for word in range(first, first + count):
        to[word] = words[word]


@kernel
def _copy_ring(target: State, source: State, to: np.ndarray, ring: np.ndarray, head: int, length: int) -> None:
    index = head
    for _ in range(length):
        to[index] = ring[index]
        _copy_request(target, source, ring[index])
        index += 1
        if index == len(ring):
            index = 0


@small_kernel
def _copy_request(target: State, source: State, slot: int) -> None:
    to, words = target.requests.view(np.int64), source.requests.view(np.int64)
    _copy_words(to, words, slot * REQUEST_WORDS, REQUEST_WORDS)
    if source.engine[0].max_encoder_tokens > 0:
        for index in range(source.facts[slot].num_encoder_inputs):
            target.encoder_inputs[slot, index] = source.encoder_inputs[slot, index]
    if source.engine[0].prefix_caching:
        request = source.requests[slot]
        for position in range(max(request.num_blocks, request.full_blocks)):
            target.tables[slot, position] = source.tables[slot, position]
