"""The emulated engine's state file, kept up with the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from predictor.engine import Engine, Outcome
from predictor.state import NOBODY
from services.emulator.clock import EngineClock
from services.emulator.contents import Names
from services.emulator.copying import Copies, copy
from services.emulator.jobs import Job
from services.engine_state.writer import Writer
from services.logs import log_event

log = logging.getLogger(__name__)

NO_HASHES = np.zeros(1, np.uint64)


def settings_of(engine: Engine, about: dict[str, Any]) -> dict[str, Any]:
    """What a state file tells of the engine once and for all."""
    return {"engine": asdict(engine.config), **about}


class EngineStateExporter:
    """Copies the engine's state into its file; an error of the file's stops the copying, not the engine."""

    def __init__(
        self, path: str, engine: Engine, clock: EngineClock, *, names: Names | None, about: dict[str, Any]
    ) -> None:  # fmt: skip
        """Put the file of an idle engine in place; without `names` it tells nothing of what blocks hold."""
        self._engine = engine
        self._clock = clock
        self._names = names
        config = engine.config
        self._writer: Writer | None = Writer(
            path,
            settings_of(engine, about),
            num_slots=len(engine.state.requests),
            num_blocks=engine.num_blocks if names else 0,
            blocks_per_request=-(-config.max_model_len // config.block_size) if names else 0,
        )
        self._hashes: dict[int, np.ndarray] = {}
        self._prefix = [0, 0]
        self._copies = self._place_copies(self._writer)
        self.publish()

    def arrived(self, job: Job, hashes: Sequence[int]) -> None:
        """Note a new request."""
        num_slots = len(self._engine.state.requests)
        if self._writer is not None and self._writer.num_slots < num_slots:
            self._guarded(partial(self._grow, self._writer, num_slots))
        if self._writer is None:
            return
        ask = job.ask
        request, facts = self._engine.request_in(job.slot), self._engine.state.facts[job.slot]
        self._writer.put_request(
            job.slot,
            serial=job.serial,
            request_id=job.engine_id,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            priority=request.priority,
            tag_tokens=ask.facts.get("tag_tokens", math.nan),
            tag_spread=ask.facts.get("tag_spread", 0.0),
            ttft_slo_s=float(facts.ttft_slo_s),
            tpot_slo_s=float(facts.tpot_slo_s),
            request_class=int(facts.request_class),
            weight=request.weight,
            client_id=request.client_id,
            session_id=request.session_id,
        )
        self._hashes[job.slot] = np.array(hashes, np.uint64)

    def started(self, num_prompt_tokens: int, num_hit_tokens: int) -> None:
        """Count requests that got their first token, for the hit rate of the prefix cache."""
        self._prefix[0] += num_prompt_tokens
        self._prefix[1] += num_hit_tokens

    def stepped(self, row: tuple[float, ...]) -> None:
        """Note a step that was taken."""
        if self._writer is not None:
            self._writer.add_step(row)

    def ended(self, job: Job, outcome: Outcome, reason: str) -> None:
        """Note what became of a request, and that its slot is free."""
        self._hashes.pop(job.slot, None)
        if self._writer is None:
            return
        self._writer.free_slot(job.slot)
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

    def publish(self) -> None:
        """Let sidecars see the engine as it is."""
        self._guarded(self._publish)

    def close(self) -> None:
        """Take the file away."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _publish(self) -> None:
        if (writer := self._writer) is None:
            return
        state = self._engine.state
        if len(writer.blocks) and state.tables.shape != self._copies.tables.shape:
            self._copies = self._place_copies(writer)  # its table has become wider
        into = writer.state
        into["clock_origin_s"] = self._clock.origin_s
        into["clock_rate"] = self._clock.speed
        into["prefix_queries"], into["prefix_hits"] = self._prefix
        copy(state, self._copies, self._names.hash_of if self._names else NO_HASHES)
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
            writer.batch[place, :num_scheduled] = batch[index, :num_scheduled]

    def _put_blocks(self, writer: Writer) -> None:
        """Write what is new of the requests' blocks and of what they hold."""
        copies, live = self._copies, writer.live
        for slot in np.flatnonzero(copies.new_hashes != NOBODY).tolist():
            start = int(copies.new_hashes[slot])
            writer.put_hashes(slot, self._hashes[slot][start : live["num_hashes"][slot]], start)
        for slot in np.flatnonzero(copies.new_blocks != NOBODY).tolist():
            start = int(copies.new_blocks[slot])
            held = max(live["num_blocks"][slot], live["full_blocks"][slot])
            writer.put_blocks(slot, copies.tables[slot, start:held], start)

    def _grow(self, writer: Writer, num_slots: int) -> None:
        writer.grow(num_slots)
        self._copies = self._place_copies(writer)

    def _place_copies(self, writer: Writer) -> Copies:
        """Take hold of the writer's arrays; the file's tables count as unknown, and will be written anew."""
        tables = np.full_like(self._engine.state.tables, NOBODY)
        num_slots = len(writer.live)
        new_hashes, new_blocks = np.full(num_slots, NOBODY), np.full(num_slots, NOBODY)
        state, live, blocks = (array.view(np.recarray) for array in (writer.state, writer.live, writer.blocks))
        return Copies(state, writer.running, writer.waiting, live, blocks, tables, new_hashes, new_blocks)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            log_event(log, logging.ERROR, "state file given up", reason=error.strerror or str(error))
            self.close()
