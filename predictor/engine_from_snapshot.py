"""Makes a simulated engine in the state of a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from predictor import queues, remote_kv, steps
from predictor.blocks import OWN_CONTENTS
from predictor.compiled import direct
from predictor.encoder_snapshot import put_back_encoder
from predictor.engine import Engine
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.request import REAL_TIME
from predictor.snapshot import STAGES, KvCache, LiveRequest, Snapshot, StepUnderWay
from predictor.snapshot_of_engine import LIVE_COUNTERS
from predictor.state import EXPECTED, FINISHED, NONE, RUNNING, TWO_ENDED_LAYOUT, WAITING, State
from predictor.step_time import StepTime

enqueue = direct(queues.enqueue)
add_transfer = direct(remote_kv.add_transfer)


def engine_from(snapshot: Snapshot, step_time: StepTime, residual: str = DEFAULT_RESIDUAL) -> Engine:
    """Return an engine in the state of a snapshot; an inconsistent field is refused by name."""
    engine = Engine(snapshot.config, step_time, residual, track_blocks=snapshot.kv_cache is not None)
    if snapshot.num_free_blocks > engine.num_blocks:
        raise ValueError(f"num_free_blocks: {snapshot.num_free_blocks} are more than the engine's {engine.num_blocks}")
    for position, item in enumerate(snapshot.running):
        with _at(f"running[{position}]"):
            _put_back(engine, item, RUNNING)
    for position, item in enumerate(snapshot.waiting):
        with _at(f"waiting[{position}]"):
            _put_back(engine, item, WAITING)
    for position, item in enumerate(snapshot.held):
        with _at(f"held[{position}]"):
            _put_back(engine, item, FINISHED)
    _put_back_blocks(engine, snapshot)
    engine.set_adapters(snapshot.adapters)
    put_back_encoder(engine, snapshot)
    head = engine.state.engine[0]
    head.now_s = min([snapshot.taken_s, *(step.start_s for step in snapshot.steps)])
    head.decodes_since_look = snapshot.decodes_since_look
    with _at("memory"):
        engine.remember(snapshot.memory)
    for position, step in enumerate(snapshot.steps):
        with _at(f"steps[{position}]"):
            _put_back_step(engine, step, snapshot.taken_s)
    _put_back_transfers(engine, snapshot)
    for position, request in enumerate(snapshot.reserved):
        with _at(f"reserved[{position}]"):
            engine.add(request)
    return engine


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Prefix an error with the field that it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


def _put_back(engine: Engine, item: LiveRequest, status: int) -> None:
    request, block_size = item.request, engine.config.block_size
    max_tokens = engine.lengths(request)[1]
    if item.produced_tokens >= max_tokens and status != FINISHED:
        raise ValueError(f"produced_tokens: {item.produced_tokens} are not below the request's limit of {max_tokens}")
    if status == RUNNING and item.num_blocks * block_size < item.computed_tokens:
        raise ValueError(f"num_blocks: {item.num_blocks} are too few for {item.computed_tokens} computed tokens")
    is_shared = engine.state.engine[0].kv_layout == TWO_ENDED_LAYOUT  # with blocks that are partly filled
    most_tokens = request.prompt_tokens + max_tokens + engine.config.most_draft_tokens
    if not is_shared and item.num_blocks * block_size >= most_tokens + block_size:
        raise ValueError(f"num_blocks: {item.num_blocks} are more than the request can need")
    prefill_tokens = item.prefill_tokens
    if prefill_tokens is None:
        known = request.prompt_tokens + item.produced_tokens
        prefill_tokens = 0 if item.computed_tokens + 1 == known + item.placeholders else known
    was_scheduled = item.computed_tokens > 0 or item.num_preemptions > 0
    slot = engine.insert(
        request,
        status=status,
        output_tokens=item.produced_tokens,
        num_blocks=item.num_blocks if status != WAITING or engine.state.engine[0].fetches else 0,
        stage=STAGES.index(item.stage),
        prefill_tokens=prefill_tokens,
        scheduled_s=request.arrival_s if was_scheduled else NONE,
        first_token_s=_first_token_s(item),
        tokens_on_time=item.tokens_on_time or 0,
        draft_tokens=min(item.draft_tokens, engine.config.num_speculative_tokens),
        **{name: getattr(item, name) for name in LIVE_COUNTERS},
    )
    head = engine.state.engine[0]
    if status == FINISHED:
        return
    if status == WAITING:
        head.num_holding += item.num_blocks > 0 and bool(head.fetches and head.holding_first)
        enqueue(engine.state, slot)
        return
    engine.state.running[head.num_running] = slot
    head.num_running += 1


def _first_token_s(item: LiveRequest) -> float:
    """Return when the first token came; where that is unknown, when it was due."""
    if item.produced_tokens == 0:
        return NONE
    if item.first_token_s is not None:
        return item.first_token_s
    slo = item.request.slo
    return item.request.arrival_s + (slo.ttft_s or 0.0 if slo is not None else 0.0)


def _put_back_transfers(engine: Engine, snapshot: Snapshot) -> None:
    """Continue the transfers."""
    head, rows = engine.state.engine[0], engine.state.requests
    items = [item for item in (*snapshot.waiting, *snapshot.held) if item.stage in ("fetching", "held")]
    head.link_at_s = head.now_s
    head.num_fetching = sum(item.stage == "fetching" for item in items)
    for item in items:
        slot = engine.slots[item.request.request_id]
        shares = item.stage == "fetching" and head.transfer_shared
        rows[slot].transfer_s = (head.link_s if shares else head.now_s) + (item.transfer_left_s or 0.0)
        add_transfer(engine.state, slot)


def _put_back_blocks(engine: Engine, snapshot: Snapshot) -> None:
    head = engine.state.engine[0]
    head.num_free_blocks = snapshot.num_free_blocks
    if head.kv_layout == TWO_ENDED_LAYOUT:
        _put_back_two_ended(engine, snapshot)
        return
    if snapshot.kv_cache is not None:
        _put_back_tables(engine, snapshot)
        _put_back_holders(engine, snapshot)
        _put_back_contents(engine, snapshot.kv_cache)
        return
    held = sum(item.num_blocks for item in snapshot.running)
    # with prefix caching, `held` counts a block once for each request that holds it
    if not engine.config.enable_prefix_caching and held + snapshot.num_free_blocks > engine.num_blocks:
        raise ValueError(
            f"num_free_blocks: {snapshot.num_free_blocks} free and {held} held are more than the engine's "
            f"{engine.num_blocks}"
        )


def _put_back_two_ended(engine: Engine, snapshot: Snapshot) -> None:
    """Enter the requests of shared blocks; each running one must have all its computed tokens there."""
    blocks = engine.state.two_ended_blocks
    placed: Counter[str] = Counter()
    held: Counter[str] = Counter()
    classes = {item.request.request_id: item.request.request_class for item in snapshot.running}
    for position, block in enumerate(snapshot.two_ended_blocks):
        with _at(f"two_ended_blocks[{position}]"):
            if (
                block.block_id >= engine.num_blocks
                or blocks[block.block_id].left != NONE
                or blocks[block.block_id].right != NONE
            ):
                raise ValueError(f"block_id: {block.block_id} lies outside the engine's blocks, or is a duplicate")
            if block.left_tokens + block.right_tokens - block.checkpointed_tokens > engine.config.block_size:
                raise ValueError(f"checkpointed_tokens: block {block.block_id} holds more tokens than fit")
            for side, name in (("left", block.left), ("right", block.right)):
                if name is not None and (name not in classes or (classes[name] == REAL_TIME) != (side == "left")):
                    raise ValueError(f"{side}: {name!r} is no running request of the class on this side")
            blocks[block.block_id] = (
                NONE if block.left is None else engine.slots[block.left],
                block.left_tokens,
                NONE if block.right is None else engine.slots[block.right],
                block.right_tokens,
                block.checkpointed_tokens,
                0,
            )
            for name, tokens in ((block.left, block.left_tokens), (block.right, block.right_tokens)):
                if name is not None:
                    placed[name] += tokens
                    held[name] += 1
    for item in snapshot.running:
        name = item.request.request_id
        if placed[name] != item.computed_tokens or held[name] != item.num_blocks:
            raise ValueError(f"two_ended_blocks: hold {placed[name]} of the {item.computed_tokens} tokens of {name!r}")
    if len(snapshot.two_ended_blocks) + snapshot.num_free_blocks != engine.num_blocks:
        raise ValueError(f"num_free_blocks: {snapshot.num_free_blocks}, but {len(snapshot.two_ended_blocks)} are held")


def _put_back_tables(engine: Engine, snapshot: Snapshot) -> None:
    for place, item in enumerate((*snapshot.running, *snapshot.held, *snapshot.waiting)):
        name = item.request.request_id
        if any(not 0 <= block < engine.num_blocks for block in item.block_ids):
            raise ValueError(f"block_ids: of {name!r} lie outside the engine's {engine.num_blocks} blocks")
        holds = place < len(snapshot.running) + len(snapshot.held)  # others may have lost their former blocks
        if holds and len(set(item.block_ids)) < len(item.block_ids):
            raise ValueError(f"block_ids: of {name!r} hold a block twice")
        if item.full_blocks > len(item.block_ids):
            raise ValueError(f"full_blocks: of {name!r} are more than its block_ids")
        engine.widen_table(len(item.block_ids))
        slot = engine.slots[name]
        engine.state.tables[slot, : len(item.block_ids)] = item.block_ids
        engine.state.requests[slot].full_blocks = item.full_blocks


def _put_back_holders(engine: Engine, snapshot: Snapshot) -> None:
    """Count the requests that hold each block, and link the blocks that none holds."""
    assert snapshot.kv_cache is not None
    blocks, head = engine.state.blocks, engine.state.engine[0]
    num_refs = np.zeros(len(blocks), np.int64)
    holding = [item for item in snapshot.waiting if item.num_blocks > 0 and engine.state.engine[0].fetches]
    for item in (*snapshot.running, *holding, *snapshot.held):
        if len(item.block_ids) != item.num_blocks:
            raise ValueError(f"block_ids: {len(item.block_ids)} are listed, {item.num_blocks} are held")
        np.add.at(num_refs, list(item.block_ids), 1)
    free = snapshot.kv_cache.free_block_ids
    if sorted(free) != np.flatnonzero(num_refs == 0).tolist():
        raise ValueError("kv_cache.free_block_ids: are not the blocks that no request holds")
    if len(free) != snapshot.num_free_blocks:
        raise ValueError(f"num_free_blocks: {snapshot.num_free_blocks}, but {len(free)} are listed as free")
    blocks.num_refs = num_refs
    order = np.array([NONE, *free, NONE])
    blocks.next_free[order[1:-1]] = order[2:]
    blocks.previous_free[order[1:-1]] = order[:-2]
    head.free_head, head.free_tail = (free[0], free[-1]) if free else (NONE, NONE)


def _put_back_contents(engine: Engine, kv_cache: KvCache) -> None:
    for block in (*kv_cache.contents, *kv_cache.own_contents):
        if not 0 <= block < engine.num_blocks:
            raise ValueError(f"kv_cache.contents: block {block} lies outside the engine's {engine.num_blocks} blocks")
    serials = engine.state.requests.serial
    own = {
        block: -2 - (int(serials[engine.slots[name]]) * OWN_CONTENTS + position)
        for block, (name, position) in kv_cache.own_contents.items()
        if name in engine.slots
    }
    engine.state.blocks.content[list(own)] = list(own.values())
    engine.cache_contents(kv_cache.contents)


def _put_back_step(engine: Engine, step: StepUnderWay, taken_s: float) -> None:
    """Put a planned step in flight; it has been running since its start."""
    for name in (*step.scheduled, *step.sampled):
        if name not in engine.slots:
            raise ValueError(f"scheduled.{name}: is no request of this snapshot")
    for name, drafts in step.drafts.items():
        if drafts > engine.config.num_speculative_tokens:
            raise ValueError(f"drafts.{name}: {drafts} are more than {engine.config.num_speculative_tokens}")
    state, sampled = engine.state, set(step.sampled)
    require_possible_step(state, len(step.scheduled), sum(step.scheduled.values()))
    index = steps.current(state)
    record, batch = state.steps[index], state.batch[index]
    steps.begin(state)
    slots = [engine.slots[name] for name in step.scheduled]
    count = record.num_scheduled = len(slots)
    batch.slot[:count] = slots
    batch.tokens[:count] = list(step.scheduled.values())
    batch.sampled[:count] = [name in sampled for name in step.scheduled]
    batch.drafts[:count] = [step.drafts.get(name, 0) for name in step.scheduled]
    batch.accepted[:count] = batch.proposed[:count] = EXPECTED
    # tokens in flight that are in no older step were scheduled by this one
    older = state.steps[state.engine[0].oldest].num_scheduled if state.engine[0].num_in_flight else 0
    in_older = np.isin(slots, state.batch[state.engine[0].oldest].slot[:older])
    rows: Any = state.requests[slots]
    before = rows.computed_tokens - np.where(in_older, batch.tokens[:count], rows.in_flight_tokens)
    record.num_swapped, record.extra_s = step.swapped_tokens, step.extra_s
    steps.sum_up(state, np.maximum(before, 0).astype(np.int64))
    steps.put_in_flight(state, step.start_s)
    record.end_s = max(record.end_s, taken_s)


def require_possible_step(state: State, num_requests: int, num_tokens: int) -> None:
    """Refuse a step that is larger than the tables of step times."""
    if num_requests > state.engine[0].max_num_seqs:
        raise ValueError(f"scheduled: {num_requests} requests are more than max_num_seqs allows")
    if num_tokens >= len(state.costs.by_tokens):
        raise ValueError(f"scheduled: {num_tokens} tokens are more than a step of this engine can have")
