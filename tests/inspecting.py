"""Inspection of an engine's arrays: its queues and its blocks, with consistency checks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from predictor.batching.lightllm import DECODES_BETWEEN_LOOKS
from predictor.engine import Engine
from predictor.state import FINISHED, NO_CONTENT, NONE, RUNNING, TWO_ENDED_LAYOUT

COUNTERS = (
    "num_running", "num_waiting", "num_pending", "num_in_flight", "num_free_blocks", "num_steps", "num_preemptions",
    "stuck",
)  # fmt: skip
ROW_COUNTERS = (
    "status", "output_tokens", "computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_blocks",
    "full_blocks", "num_preemptions", "hit_tokens",
)  # fmt: skip
ROW_TIMES = ("scheduled_s", "first_token_s", "finished_s")


def free_list(engine: Engine) -> list[int]:
    """Return the free blocks in the order of reuse; the chain must be the same backwards."""
    blocks = engine.state.blocks
    chain, before, block = [], NONE, int(engine.state.engine[0].free_head)
    while block != NONE:
        assert blocks[block].previous_free == before
        chain.append(block)
        assert len(chain) <= len(blocks), "the free list is a circle"
        before, block = block, int(blocks[block].next_free)
    assert engine.state.engine[0].free_tail == before
    return chain


def held_blocks(engine: Engine, request_id: str) -> list[int]:
    """Return the blocks of a request, in order; empty if blocks have no identity."""
    if not engine.state.engine[0].prefix_caching:
        return []
    slot = engine.slots[request_id]
    return [int(block) for block in engine.state.tables[slot, : engine.state.requests[slot].num_blocks]]


def same_content(engine: Engine, content: int) -> list[int]:
    """Return the blocks with a shared content, the one that is hit first."""
    chain, block = [], int(engine.state.cached[content])
    while block != NONE:
        chain.append(block)
        assert len(chain) <= len(engine.state.blocks), "a chain of equal blocks is a circle"
        block = int(engine.state.blocks[block].next_same)
    return chain


def expect_blocks_conserved(engine: Engine) -> None:
    """Check that each block is either free or held, with the right reference count."""
    head, rows = engine.state.engine[0], engine.state.requests
    if head.kv_layout == TWO_ENDED_LAYOUT:
        expect_two_ended_blocks_conserved(engine)
        return
    held = sum(int(rows[slot].num_blocks) for slot in engine.slots.values())
    if not head.prefix_caching:
        assert head.num_free_blocks + held == engine.num_blocks
        return
    blocks = engine.state.blocks
    free = free_list(engine)
    assert len(free) == head.num_free_blocks
    assert len(set(free)) == len(free)
    holders = Counter(block for name in engine.slots for block in held_blocks(engine, name))
    assert sorted([*free, *holders]) == list(range(engine.num_blocks))
    assert [int(count) for count in blocks.num_refs] == [holders[block] for block in range(engine.num_blocks)]
    for content in range(len(engine.contents)):
        assert sorted(same_content(engine, content)) == [int(b) for b in np.flatnonzero(blocks.content == content)]
    for name in engine.running():
        slot = engine.slots[name]
        full = held_blocks(engine, name)[: rows[slot].full_blocks]
        assert all(blocks[block].content != NO_CONTENT for block in full)


def expect_two_ended_blocks_conserved(engine: Engine) -> None:
    """Check that no block holds more tokens than fit, and that all computed tokens of running requests are somewhere."""
    blocks, rows = engine.state.two_ended_blocks, engine.state.requests
    tokens: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for block in blocks:
        assert 0 <= block.checkpointed <= block.right_tokens
        assert block.left_tokens + block.right_tokens - block.checkpointed <= engine.config.block_size
        for slot, count in ((block.left, block.left_tokens), (block.right, block.right_tokens)):
            assert (slot == NONE) == (count == 0)
            if slot != NONE:
                tokens[int(slot)] += int(count)
                held[int(slot)] += 1
        for slot, number in ((block.left, 0), (block.right, 1)):
            assert slot == NONE or engine.state.facts[slot].request_class == number
    free = np.count_nonzero((blocks.left == NONE) & (blocks.right == NONE))
    assert engine.state.engine[0].num_free_blocks == free
    for slot in engine.slots.values():
        assert rows[slot].num_blocks == held[slot]
        if rows[slot].status == RUNNING:
            assert tokens[slot] == rows[slot].computed_tokens
            if rows[slot].in_flight_tokens > 0:  # what a step computes with is on the GPU
                assert not any(block.checkpointed for block in blocks if block.right == slot)


def expect_nothing_left(engine: Engine) -> None:
    """Check that the engine has no requests and all its blocks are free."""
    head = engine.state.engine[0]
    assert (head.num_running, head.num_waiting, head.num_pending, head.num_in_flight) == (0, 0, 0, 0)
    assert head.num_free_blocks == engine.num_blocks
    expect_blocks_conserved(engine)


def counts_of(engine: Engine) -> dict[str, Any]:
    """Return all counters of an engine; two equal runs agree on them exactly."""
    head, rows, blocks = engine.state.engine[0], engine.state.requests, engine.state.blocks
    counts: dict[str, Any] = {name: int(head[name]) for name in COUNTERS}
    counts |= {"running": engine.running(), "waiting": engine.waiting()}
    counts["two_ended_blocks"] = engine.state.two_ended_blocks.tolist()
    if engine.config.batcher == "lightllm":  # the only batcher that reads it
        counts["decodes_since_look"] = (int(head.decodes_since_look) - 1) % DECODES_BETWEEN_LOOKS  # looks in between
    for name, slot in engine.slots.items():
        counts[name] = {counter: int(rows[slot][counter]) for counter in ROW_COUNTERS}
        if rows[slot].status in (RUNNING, FINISHED):
            counts[name]["blocks"] = held_blocks(engine, name)
    if head.prefix_caching:
        counts["free"] = free_list(engine)
        counts["contents"] = [int(content) for content in blocks.content]
        counts["same"] = [same_content(engine, content) for content in range(len(engine.contents))]
    return counts


def times_of(engine: Engine) -> dict[str, float]:
    """Return all times of an engine; two equal runs agree on them up to rounding."""
    head, rows = engine.state.engine[0], engine.state.requests
    times = {f"{name}.{time}": float(rows[slot][time]) for name, slot in engine.slots.items() for time in ROW_TIMES}
    for place in range(head.num_in_flight):
        step = engine.state.steps[(head.oldest + place) % 2]
        times |= {f"step{place}.start_s": float(step.start_s), f"step{place}.end_s": float(step.end_s)}
    return {**times, "now_s": float(head.now_s)}


def frozen(engine: Engine) -> list[bytes]:
    """Copy all valid bytes of an engine's state, to detect writes; unused slots are left out."""
    state = engine.state
    taken = sorted(engine.slots.values())
    by_slot = [array[taken].tobytes() for array in (state.requests, state.tables, state.hashes)]
    rings = [np.array(array).tobytes() for array in (state.running, state.waiting, state.pending, state.preempted)]
    rest = (
        state.engine, state.steps, state.batch, state.two_ended_blocks, state.blocks, state.cached,
    )  # fmt: skip
    return [*by_slot, *rings, *(array.tobytes() for array in rest)]
