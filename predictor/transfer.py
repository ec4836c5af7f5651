"""From a simulated engine to a snapshot of it, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from predictor import queues, steps
from predictor.blocks import OWN_CONTENTS
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.snapshot import VERSION, KvCache, LiveRequest, Snapshot, StepUnderWay
from predictor.state import FINISHED, NOBODY, NOTHING, RUNNING, WAITING
from predictor.step_time import StepTime

COUNTERS = ("computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_preemptions")


def snapshot_of(engine: Engine, taken_s: float) -> Snapshot:
    """Write down an engine's state."""
    head = engine.state.engine[0]
    running = [int(slot) for slot in engine.state.running[: head.num_running]]
    waiting = [int(queues.waiting_at(engine.state, place)) for place in range(head.num_waiting)]
    pending = [
        int(engine.state.pending[(head.pending_head + place) % len(engine.state.pending)])
        for place in range(head.num_pending)
    ]
    return Snapshot(
        version=VERSION,
        taken_s=taken_s,
        config=engine.config,
        num_free_blocks=int(head.num_free_blocks),
        running=tuple(_live(engine, slot) for slot in running),
        waiting=tuple(_live(engine, slot) for slot in waiting),
        reserved=tuple(engine.request_in(slot) for slot in pending),
        steps=tuple(_under_way(engine, place) for place in range(head.num_in_flight)),
        kv_cache=_kv_cache(engine) if head.prefix_caching else None,
        decodes_since_prefill=int(head.decodes_since_prefill),
    )


def _live(engine: Engine, slot: int) -> LiveRequest:
    row = engine.state.requests[slot]
    held = 0
    if engine.state.engine[0].prefix_caching:
        held = int(row.num_blocks) if row.status == RUNNING else int(row.full_blocks)
    return LiveRequest(
        request=engine.request_in(slot),
        produced_tokens=int(row.output_tokens),
        num_blocks=int(row.num_blocks),
        full_blocks=int(row.full_blocks),
        block_ids=tuple(int(block) for block in engine.state.tables[slot, :held]),
        **{name: int(row[name]) for name in COUNTERS},
    )


def _under_way(engine: Engine, place: int) -> StepUnderWay:
    index = (engine.state.engine[0].oldest + place) % 2
    step = engine.state.steps[index]
    entries = engine.state.batch[index, : step.num_scheduled]
    # a request that ended while the step was under way has no part in it any more
    live = [entry for entry in entries if engine.state.requests[entry.slot].status in (RUNNING, WAITING)]
    return StepUnderWay(
        start_s=float(step.start_s),
        scheduled={engine.id_of(entry.slot): int(entry.tokens) for entry in live},
        sampled=tuple(engine.id_of(entry.slot) for entry in live if entry.sampled),
    )


def _kv_cache(engine: Engine) -> KvCache:
    blocks = engine.state.blocks
    rows = engine.state.requests
    by_serial = {int(rows[slot].serial): name for name, slot in engine.slots.items() if rows[slot].status != FINISHED}
    contents, own_contents = {}, {}
    for content, value in enumerate(engine.contents):  # of blocks that hold the same, the first is the one that is hit
        block = int(engine.state.cached[content])
        while block != NOBODY:
            contents[block] = value
            block = int(blocks[block].next_same)
    for index in np.flatnonzero(blocks.content < NOTHING):
        serial, position = divmod(-2 - int(blocks.content[index]), OWN_CONTENTS)
        if serial in by_serial:
            own_contents[int(index)] = (by_serial[serial], position)
    free, block = [], int(engine.state.engine[0].free_head)
    while block != NOBODY:
        free.append(block)
        block = int(blocks[block].next_free)
    return KvCache(free_block_ids=tuple(free), contents=contents, own_contents=own_contents)


def engine_from(snapshot: Snapshot, step_time: StepTime, residual: str = DEFAULT_RESIDUAL) -> Engine:
    """Make the engine that a snapshot shows; what is inconsistent in it is refused by name."""
    engine = Engine(snapshot.config, step_time, residual, track_blocks=snapshot.kv_cache is not None)
    if snapshot.num_free_blocks > engine.num_blocks:
        raise ValueError(f"num_free_blocks: {snapshot.num_free_blocks} are more than the engine's {engine.num_blocks}")
    for place, item in enumerate(snapshot.running):
        with _at(f"running[{place}]"):
            _put_back(engine, item, RUNNING)
    for place, item in enumerate(snapshot.waiting):
        with _at(f"waiting[{place}]"):
            _put_back(engine, item, WAITING)
    _put_back_blocks(engine, snapshot)
    head = engine.state.engine[0]
    head.now_s = min([snapshot.taken_s, *(step.start_s for step in snapshot.steps)])
    head.decodes_since_prefill = snapshot.decodes_since_prefill
    for place, step in enumerate(snapshot.steps):
        with _at(f"steps[{place}]"):
            _put_back_step(engine, step, snapshot.taken_s)
    for place, request in enumerate(snapshot.reserved):
        with _at(f"reserved[{place}]"):
            engine.add(request)
    return engine


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where a complaint belongs."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


def _put_back(engine: Engine, item: LiveRequest, status: int) -> None:
    request = item.request
    if item.produced_tokens >= engine.lengths(request)[1]:
        raise ValueError(f"produced_tokens: {item.produced_tokens} are as many as the request may have")
    slot = engine.place(request, produced_tokens=item.produced_tokens)
    row = engine.state.requests[slot]
    for name in COUNTERS:
        row[name] = getattr(item, name)
    row.output_tokens = item.produced_tokens
    if item.produced_tokens > 0:
        row.first_token_s = request.arrival_s
    if item.computed_tokens > 0 or item.num_preemptions > 0:
        row.scheduled_s = request.arrival_s
    head = engine.state.engine[0]
    if status == WAITING:
        queues.enqueue(engine.state, slot)
        return
    if item.num_blocks * engine.config.block_size < item.computed_tokens:
        raise ValueError(f"num_blocks: {item.num_blocks} are too few for {item.computed_tokens} computed tokens")
    most = -(
        -min(request.prompt_tokens + engine.lengths(request)[1], engine.config.max_model_len)
        // engine.config.block_size
    )
    if item.num_blocks > most:
        raise ValueError(f"num_blocks: {item.num_blocks} are more than the request can ever need")
    row.status = RUNNING
    row.num_blocks = item.num_blocks
    engine.state.running[head.num_running] = slot
    head.num_running += 1


def _put_back_blocks(engine: Engine, snapshot: Snapshot) -> None:
    head = engine.state.engine[0]
    head.num_free_blocks = snapshot.num_free_blocks
    if snapshot.kv_cache is not None:
        _put_back_tables(engine, snapshot)
        _put_back_holders(engine, snapshot)
        _put_back_contents(engine, snapshot.kv_cache)
        return
    held = sum(item.num_blocks for item in snapshot.running)
    # where prefixes are shared a block counts once for each request that holds it
    if not engine.config.enable_prefix_caching and held + snapshot.num_free_blocks > engine.num_blocks:
        raise ValueError(
            f"num_free_blocks: {snapshot.num_free_blocks} free and {held} held are more than the engine's "
            f"{engine.num_blocks}"
        )


def _put_back_tables(engine: Engine, snapshot: Snapshot) -> None:
    for item in (*snapshot.running, *snapshot.waiting):
        name = item.request.request_id
        if any(not 0 <= block < engine.num_blocks for block in item.block_ids):
            raise ValueError(f"block_ids: of {name!r} lie outside the engine's {engine.num_blocks} blocks")
        if len(set(item.block_ids)) < len(item.block_ids):
            raise ValueError(f"block_ids: of {name!r} hold a block twice")
        if item.full_blocks > len(item.block_ids):
            raise ValueError(f"full_blocks: of {name!r} are more than its block_ids")
        engine.widen_table(len(item.block_ids))
        slot = engine.slots[name]
        engine.state.tables[slot, : len(item.block_ids)] = item.block_ids
        engine.state.requests[slot].full_blocks = item.full_blocks


def _put_back_holders(engine: Engine, snapshot: Snapshot) -> None:
    """Count who holds each block, and chain those that nobody does."""
    assert snapshot.kv_cache is not None
    blocks, head = engine.state.blocks, engine.state.engine[0]
    num_refs = np.zeros(len(blocks), np.int64)
    for item in snapshot.running:
        if len(item.block_ids) != item.num_blocks:
            raise ValueError(f"block_ids: {len(item.block_ids)} are listed, {item.num_blocks} are held")
        np.add.at(num_refs, list(item.block_ids), 1)
    free = snapshot.kv_cache.free_block_ids
    if sorted(free) != np.flatnonzero(num_refs == 0).tolist():
        raise ValueError("kv_cache.free_block_ids: are not the blocks that nobody holds")
    if len(free) != snapshot.num_free_blocks:
        raise ValueError(f"num_free_blocks: {snapshot.num_free_blocks}, but {len(free)} are listed as free")
    blocks.num_refs = num_refs
    head.free_head, head.free_tail = (free[0], free[-1]) if free else (NOBODY, NOBODY)
    for before, after in zip((NOBODY, *free), (*free, NOBODY), strict=True):
        if before != NOBODY:
            blocks[before].next_free = after
        if after != NOBODY:
            blocks[after].previous_free = before


def _put_back_contents(engine: Engine, kv_cache: KvCache) -> None:
    blocks = engine.state.blocks
    for block in (*kv_cache.contents, *kv_cache.own_contents):
        if not 0 <= block < len(blocks):
            raise ValueError(f"kv_cache.contents: block {block} lies outside the engine's {len(blocks)} blocks")
    for block, (name, position) in kv_cache.own_contents.items():
        if name in engine.slots:
            serial = int(engine.state.requests[engine.slots[name]].serial)
            blocks[block].content = -2 - (serial * OWN_CONTENTS + position)
    engine.know_contents(kv_cache.contents.values())
    for block, value in kv_cache.contents.items():
        engine.cache_content(block, value)


def _put_back_step(engine: Engine, step: StepUnderWay, taken_s: float) -> None:
    """Put a planned step under way; the time it has run already is taken off."""
    for name in (*step.scheduled, *step.sampled):
        if name not in engine.slots:
            raise ValueError(f"scheduled.{name}: is no request of this snapshot")
    state, sampled = engine.state, set(step.sampled)
    planned_before = (
        [entry.slot for entry in state.batch[state.engine[0].oldest]] if state.engine[0].num_in_flight else []
    )
    index = steps.current(state)
    record = state.steps[index]
    steps.begin(state)
    steps.clear_sums(record)
    for name, tokens in step.scheduled.items():
        slot = engine.slots[name]
        entry = state.batch[index, record.num_scheduled]
        entry.slot, entry.tokens, entry.sampled = slot, tokens, name in sampled
        record.num_scheduled += 1
        row = state.requests[slot]
        later = 0 if slot in planned_before else int(row.in_flight_tokens) - tokens
        steps.add_to_sums(record, entry, max(0, int(row.computed_tokens) - tokens - later))
    steps.put_under_way(state, step.start_s)
    record.end_s = max(record.end_s, taken_s)
