"""The emulated engine's state file, which sidecars read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.outcome import Outcome
from predictor.request import LEGS
from predictor.state import NONE
from services.emulator.clock import EngineClock
from services.emulator.content_hashes import ContentHashes
from services.emulator.jobs import Job
from services.emulator.speculation import DraftCounts
from services.emulator.state_export import Copies, export_state
from services.engine_state import layout
from services.engine_state.writer import Writer
from services.logs import log_event

log = logging.getLogger(__name__)

NO_HASHES = np.zeros(1, np.uint64)


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
        self.put_facts(job)
        self._hashes[job.slot] = np.array(hashes, np.uint64)

    def put_facts(self, job: Job) -> None:
        """Write the facts of a request that has not been scheduled yet."""
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
        export_state(state, self._copies, self._contents.hash_of if self._contents else NO_HASHES)
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
