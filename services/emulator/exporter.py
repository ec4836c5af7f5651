"""The emulated engine's state file: block contents, copies of the engine's arrays, and the exporter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from predictor import remote_kv
from predictor.compiled import direct, kernel
from predictor.engine import Engine, Outcome
from predictor.request import LEGS
from predictor.state import FINISHED, HELD, LOST, MEMORY_SIZE, NONE, State
from services.emulator.clock import EngineClock
from services.emulator.jobs import Job
from services.emulator.speculation import DraftCounts
from services.engine_state import layout
from services.engine_state.writer import Writer
from services.logs import log_event

log = logging.getLogger(__name__)

NO_HASHES = np.zeros(1, np.uint64)
SPARE_CONTENTS = 1 << 16  # remembered beyond four for each block


class ContentHashes:
    """The hash of each block content, by the number that the engine gave it."""

    def __init__(self, engine: Engine) -> None:
        """Start with an engine that knows no content yet."""
        self._engine = engine
        self._max_contents = 4 * engine.num_blocks + SPARE_CONTENTS
        self.hash_of = np.zeros(1024, np.uint64)

    def learn(self, hashes: Sequence[int]) -> None:
        """Have the engine number contents before the request that has them arrives."""
        engine = self._engine
        if len(engine.contents) + len(hashes) > self._max_contents:
            forget_contents(engine)
            self.hash_of[: len(engine.contents)] = np.fromiter(engine.contents, np.uint64)
        engine.know_contents(hashes)
        if len(engine.contents) > len(self.hash_of):
            self.hash_of = np.concatenate((self.hash_of, np.zeros(len(engine.contents), np.uint64)))
        self.hash_of[[engine.contents[value] for value in hashes]] = hashes


def forget_contents(engine: Engine) -> None:
    """Renumber the contents, and keep only those of blocks and of present requests."""
    state = engine.state
    rows = [state.hashes[slot, : state.requests[slot].num_hashes] for slot in engine.slots.values()]
    content = state.blocks["content"]
    shared = content >= 0
    kept = np.unique(np.concatenate((content[shared], *rows)))
    numbers = np.full(len(engine.contents), NONE)
    numbers[kept] = np.arange(len(kept))
    content[shared] = numbers[content[shared]]
    for row in rows:
        row[:] = numbers[row]
    state.cached[: len(kept)] = state.cached[kept]
    state.cached[len(kept) :] = NONE
    values = list(engine.contents)
    engine.contents = {values[old]: new for new, old in enumerate(kept.tolist())}


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


copy = direct(_copy)


def settings_of(engine: Engine, about: dict[str, Any]) -> dict[str, Any]:
    """Return the constant part of a state file."""
    return {"engine": asdict(engine.config), **about}


class EngineStateExporter:
    """Copies the engine's state into its file; an error of the file stops the export, not the engine."""

    def __init__(
        self, path: str, engine: Engine, clock: EngineClock, *, contents: ContentHashes | None, about: dict[str, Any]
    ) -> None:  # fmt: skip
        """Create the file of an idle engine; without `contents` the contents of blocks are not exported."""
        self._engine = engine
        self._clock = clock
        self._contents = contents
        config = engine.config
        self._writer: Writer | None = Writer(
            path,
            settings_of(engine, about),
            num_slots=len(engine.state.requests),
            num_blocks=engine.num_blocks if contents else 0,
            blocks_per_request=-(-config.max_model_len // config.block_size) if contents else 0,
            num_clients=len(engine.state.clients),
            num_adapters=len(engine.state.adapters),
        )
        self._hashes: dict[int, np.ndarray] = {}
        self._prefix = [0, 0]
        self._copies = self._bind_arrays(self._writer)
        self.publish()

    def arrived(self, job: Job, hashes: Sequence[int]) -> None:
        """Add a request."""
        num_slots = len(self._engine.state.requests)
        if self._writer is not None and self._writer.num_slots < num_slots:
            self._guarded(partial(self._grow, self._writer, num_slots))
        if self._writer is None:
            return
        parsed = job.request
        request, facts = self._engine.request_in(job.slot), self._engine.state.facts[job.slot]
        self._writer.put_request(
            job.slot,
            serial=job.serial,
            request_id=job.engine_id,
            arrival_s=job.arrived_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=parsed.max_tokens,
            min_tokens=parsed.min_tokens,
            priority=request.priority,
            tag_tokens=parsed.facts.get("tag_tokens", math.nan),
            tag_spread=parsed.facts.get("tag_spread", 0.0),
            ttft_slo_s=float(facts.ttft_slo_s),
            tpot_slo_s=float(facts.tpot_slo_s),
            request_class=int(facts.request_class),
            weight=request.weight,
            leg=LEGS.index(request.leg),
            client_id=request.client_id,
            session_id=request.session_id,
            adapter=request.adapter,
        )
        self._hashes[job.slot] = np.array(hashes, np.uint64)

    def started(self, num_prompt_tokens: int, num_hit_tokens: int) -> None:
        """Count requests that got their first token, for the hit rate of the prefix cache."""
        self._prefix[0] += num_prompt_tokens
        self._prefix[1] += num_hit_tokens

    def drafted(self, counts: DraftCounts) -> None:
        """Set the counts of speculative decoding since the engine's start."""
        if self._writer is not None:
            into = self._writer.state
            into["num_drafts"], into["num_draft_tokens"] = counts.num_drafts, counts.num_draft_tokens
            into["num_draft_chances"] = counts.num_chances
            into["num_accepted"][0, : len(counts.accepted)] = counts.accepted

    def fetched(self) -> None:
        """Count a fetch that has ended."""
        if self._writer is not None:
            self._writer.state["num_fetched"] += 1

    def stepped(self, row: tuple[float, ...], loads: tuple[int, int]) -> None:
        """Add a completed step."""
        if self._writer is not None:
            self._writer.add_step(row, loads)

    def ended(self, job: Job, outcome: Outcome, reason: str) -> None:
        """Add the outcome of a request."""
        if self._writer is None:
            return
        self._writer.add_outcome(
            serial=job.serial,
            request_id=outcome.request_id,
            arrival_s=outcome.arrival_s,
            scheduled_s=outcome.scheduled_s,
            first_token_s=outcome.first_token_s,
            finished_s=outcome.finished_s,
            prompt_tokens=outcome.prompt_tokens,
            output_tokens=outcome.output_tokens,
            hit_tokens=outcome.prefix_hit_tokens,
            num_preemptions=outcome.num_preemptions,
            reason=reason,
        )

    def removed(self, job: Job) -> None:
        """Free the slot of a request that has ended."""
        self._hashes.pop(job.slot, None)
        if self._writer is not None:
            self._writer.free_slot(job.slot)

    def publish(self) -> None:
        """Publish the present state to sidecars."""
        self._guarded(self._publish)

    def close(self) -> None:
        """Remove the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _publish(self) -> None:
        if (writer := self._writer) is None:
            return
        state = self._engine.state
        if len(writer.blocks) and state.tables.shape != self._copies.tables.shape:
            self._copies = self._bind_arrays(writer)  # the table was widened
        into = writer.state
        into["clock_origin_s"] = self._clock.origin_s
        into["clock_rate"] = self._clock.speed
        into["prefix_queries"], into["prefix_hits"] = self._prefix
        copy(state, self._copies, self._contents.hash_of if self._contents else NO_HASHES)
        self._copy_steps(writer)
        if len(writer.blocks):
            self._put_blocks(writer)
        writer.publish()

    def _copy_steps(self, writer: Writer) -> None:
        state = self._engine.state
        steps, batch = state.steps.view(np.ndarray), state.batch.view(np.ndarray)
        oldest = int(state.engine.view(np.ndarray)["oldest"][0])
        for place in range(int(writer.state["num_in_flight"][0])):
            index = (oldest + place) % 2
            num_scheduled = int(steps["num_scheduled"][index])
            writer.state["num_scheduled"][0, place] = num_scheduled
            writer.state["start_s"][0, place] = steps["start_s"][index]
            for name in layout.SCHEDULED.names or ():
                writer.batch[name][place, :num_scheduled] = batch[name][index, :num_scheduled]

    def _put_blocks(self, writer: Writer) -> None:
        """Write the new blocks of requests and their hashes."""
        copies, live = self._copies, writer.live
        for slot in np.flatnonzero(copies.new_hashes != NONE).tolist():
            start = int(copies.new_hashes[slot])
            writer.put_hashes(slot, self._hashes[slot][start : live["num_hashes"][slot]], start)
        for slot in np.flatnonzero(copies.new_blocks != NONE).tolist():
            start = int(copies.new_blocks[slot])
            held = max(live["num_blocks"][slot], live["full_blocks"][slot])
            writer.put_blocks(slot, copies.tables[slot, start:held], start)

    def _grow(self, writer: Writer, num_slots: int) -> None:
        writer.grow(num_slots)
        self._copies = self._bind_arrays(writer)

    def _bind_arrays(self, writer: Writer) -> Copies:
        """Bind the writer's arrays; all tables count as unknown, and are written again."""
        tables = np.full_like(self._engine.state.tables, NONE)
        num_slots = len(writer.live)
        new_hashes, new_blocks = np.full(num_slots, NONE), np.full(num_slots, NONE)
        state, clients, adapters, live, blocks = (
            array.view(np.recarray)
            for array in (writer.state, writer.clients, writer.adapters, writer.live, writer.blocks)
        )
        return Copies(
            state,
            clients,
            adapters,
            writer.running,
            writer.waiting,
            writer.held,
            live,
            blocks,
            tables,
            new_hashes,
            new_blocks,
        )

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            log_event(log, logging.ERROR, "state file closed after an error", reason=error.strerror or str(error))
            self.close()
