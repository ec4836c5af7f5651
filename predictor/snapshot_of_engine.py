"""Describes a simulated engine's state as a snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np

from predictor import queues, remote_kv
from predictor.blocks import OWN_CONTENTS
from predictor.encoder_snapshot import encoder_outputs, referenced_inputs, with_identities
from predictor.engine import Engine
from predictor.snapshot import (
    STAGES,
    VERSION,
    KvCache,
    LiveRequest,
    Memory,
    ServedClient,
    Snapshot,
    StepUnderWay,
    TwoEndedBlock,
)
from predictor.state import FETCHING, FINISHED, HELD, NO_CONTENT, NO_TRANSFER, NONE, RUNNING, SHOWN_STAGES, WAITING

LIVE_COUNTERS = ("computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_preemptions")


def snapshot_of(engine: Engine, taken_s: float) -> Snapshot:
    """Return an engine's state as a snapshot."""
    head = engine.state.engine[0]
    running = [int(slot) for slot in engine.state.running[: head.num_running]]
    waiting = [int(queues.waiting_at(engine.state, position)) for position in range(head.num_waiting)]
    pending = [
        int(engine.state.pending[(head.pending_head + position) % len(engine.state.pending)])
        for position in range(head.num_pending)
    ]
    return Snapshot(
        version=VERSION,
        taken_s=taken_s,
        config=engine.config,
        num_free_blocks=int(head.num_free_blocks),
        running=tuple(_live(engine, slot) for slot in running),
        waiting=tuple(_live(engine, slot) for slot in waiting),
        held=tuple(_live(engine, slot) for slot in _held(engine)),
        reserved=tuple(engine.request_in(slot) for slot in pending),
        steps=tuple(_in_flight(engine, ahead) for ahead in range(head.num_in_flight)),
        kv_cache=_kv_cache(engine) if head.prefix_caching else None,
        decodes_since_look=int(head.decodes_since_look),
        memory=_memory(engine),
        two_ended_blocks=_two_ended_blocks(engine),
        adapters=engine.adapters(),
        encoder_outputs=encoder_outputs(engine),
    )


def _memory(engine: Engine) -> Memory:
    head = engine.state.engine[0]
    if not engine.batcher.estimates:  # nor does it count
        return Memory()
    return Memory(
        num_steps=int(head.num_steps),
        correction=float(head.correction),
        numbers=tuple(np.trim_zeros(head.memory, "b").tolist()),
        clients=tuple(
            ServedClient(
                tenant=int(row.tenant), weight=float(row.weight), tokens=float(row.tokens), waits=bool(row.waits)
            )
            for row in engine.state.clients[: head.num_clients]
        ),
    )


def _held(engine: Engine) -> list[int]:
    """Return the slots of requests that have ended, and whose blocks are not free yet."""
    state, head = engine.state, engine.state.engine[0]
    deferred = []
    if head.defers_frees and head.num_in_flight:
        entries = state.batch[head.oldest, : state.steps[head.oldest].num_scheduled]
        deferred = [int(slot) for slot in entries["slot"] if state.requests[slot].stage == NO_TRANSFER]
    slots = [*(int(slot) for slot in state.transfers[: head.num_transfers]), *deferred]
    return [slot for slot in slots if state.requests[slot].status == FINISHED and state.requests[slot].num_blocks > 0]


def _live(engine: Engine, slot: int) -> LiveRequest:
    row = engine.state.requests[slot]
    held = 0
    if engine.state.engine[0].prefix_caching:
        held = int(row.num_blocks) if row.status == RUNNING or row.num_blocks > 0 else int(row.full_blocks)
    stage, transfer_left_s = _transfer(engine, slot)
    counters: dict[str, Any] = {name: int(row[name]) for name in LIVE_COUNTERS}
    return LiveRequest(
        request=with_identities(engine, slot),
        referenced_inputs=referenced_inputs(engine, slot),
        produced_tokens=int(row.output_tokens),
        num_blocks=int(row.num_blocks),
        full_blocks=int(row.full_blocks),
        prefill_tokens=int(row.prefill_tokens),
        first_token_s=float(row.first_token_s) if row.first_token_s >= 0 else None,
        tokens_on_time=int(row.tokens_on_time) if row.tokens_on_time >= 0 else None,
        block_ids=tuple(int(block) for block in engine.state.tables[slot, :held]),
        stage=stage,
        transfer_left_s=transfer_left_s,
        draft_tokens=int(row.draft_tokens),
        **counters,
    )


def _transfer(engine: Engine, slot: int) -> tuple[str, float | None]:
    """Return the stage of a request's transfer, and for how long it goes on: on a shared link, the work left."""
    state, head, row = engine.state, engine.state.engine[0], engine.state.requests[slot]
    if row.status == FINISHED and row.stage == NO_TRANSFER:  # its blocks are free once the step in flight has ended
        return STAGES[HELD], max(0.0, float(state.steps[head.oldest].end_s - head.now_s))
    left_s = None
    if row.stage == FETCHING and head.transfer_shared:
        since_s = max(0.0, float(head.now_s - head.link_at_s))
        left_s = max(0.0, float(row.transfer_s - head.link_s) - since_s / int(head.num_fetching))
    elif row.stage == HELD or remote_kv.is_under_way(row.stage):
        left_s = max(0.0, float(row.transfer_s - head.now_s))
    return STAGES[SHOWN_STAGES[row.stage]], left_s


def _in_flight(engine: Engine, ahead: int) -> StepUnderWay:
    index = (engine.state.engine[0].oldest + ahead) % 2
    step = engine.state.steps[index]
    entries = engine.state.batch[index, : step.num_scheduled]
    # requests that have ended since the step was planned are left out
    live = [entry for entry in entries if engine.state.requests[entry.slot].status in (RUNNING, WAITING)]
    return StepUnderWay(
        start_s=float(step.start_s),
        scheduled={engine.id_of(entry.slot): int(entry.tokens) for entry in live},
        sampled=tuple(engine.id_of(entry.slot) for entry in live if entry.sampled),
        swapped_tokens=int(step.num_swapped),
        extra_s=float(step.extra_s),
        drafts={engine.id_of(entry.slot): int(entry.drafts) for entry in live if entry.drafts},
    )


def _two_ended_blocks(engine: Engine) -> tuple[TwoEndedBlock, ...]:
    blocks = engine.state.two_ended_blocks
    return tuple(
        TwoEndedBlock(
            block_id=int(index),
            left=None if row.left == NONE else engine.id_of(row.left),
            left_tokens=int(row.left_tokens),
            right=None if row.right == NONE else engine.id_of(row.right),
            right_tokens=int(row.right_tokens),
            checkpointed_tokens=int(row.checkpointed),
        )
        for index in np.flatnonzero((blocks.left != NONE) | (blocks.right != NONE))
        for row in (blocks[index],)
    )


def _kv_cache(engine: Engine) -> KvCache:
    blocks = engine.state.blocks
    rows = engine.state.requests
    by_serial = {int(rows[slot].serial): name for name, slot in engine.slots.items() if rows[slot].status != FINISHED}
    contents, own_contents = {}, {}
    for content, value in enumerate(engine.contents):  # in this order: the first of blocks with the same content is hit
        block = int(engine.state.cached[content])
        while block != NONE:
            contents[block] = value
            block = int(blocks[block].next_same)
    for index in np.flatnonzero(blocks.content < NO_CONTENT):
        serial, position = divmod(-2 - int(blocks.content[index]), OWN_CONTENTS)
        if serial in by_serial:
            own_contents[int(index)] = (by_serial[serial], position)
    free, block = [], int(engine.state.engine[0].free_head)
    while block != NONE:
        free.append(block)
        block = int(blocks[block].next_free)
    return KvCache(free_block_ids=tuple(free), contents=contents, own_contents=own_contents)
