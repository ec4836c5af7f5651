"""The emulated engine's state file, kept up with the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from predictor.engine import Engine, Outcome
from predictor.state import NOBODY
from services.emulator.clock import EngineClock
from services.emulator.contents import Names
from services.emulator.jobs import Job
from services.export.writer import Writer
from services.log_lines import say

log = logging.getLogger(__name__)

COPIED = (
    "output_tokens", "computed_tokens", "placeholders", "in_flight_tokens", "stale_tokens", "num_blocks",
    "full_blocks", "num_preemptions", "hit_tokens", "prefill_tokens", "scheduled_s", "first_token_s",
)  # fmt: skip


def settings_of(engine: Engine, about: dict[str, Any]) -> dict[str, Any]:
    """What a state file tells of the engine once and for all."""
    return {"engine": asdict(engine.config), **about}


class Exporter:
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
        self._tables = np.zeros((0, 0), np.int32)  # as they are in the file
        self._hashes: dict[int, np.ndarray] = {}
        self._prefix = [0, 0]
        self.publish()

    def arrived(self, job: Job, arrival_s: float, hashes: Sequence[int]) -> None:
        """Note a new request."""
        num_slots = len(self._engine.state.requests)
        if self._writer is not None and self._writer.num_slots < num_slots:
            self._guarded(partial(self._writer.grow, num_slots))
        if self._writer is None:
            return
        ask = job.ask
        self._writer.put_request(
            job.slot,
            serial=job.serial,
            request_id=job.engine_id,
            arrival_s=arrival_s,
            prompt_tokens=len(ask.prompt),
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            tag_tokens=ask.tag_tokens,
            tag_spread=ask.tag_spread,
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
        state, into = self._engine.state, writer.state
        head = state.engine.view(np.ndarray)
        num_running, num_waiting = int(head["num_running"][0]), int(head["num_waiting"][0])
        into["clock_origin_s"] = self._clock.origin_s
        into["clock_rate"] = self._clock.speed
        into["num_blocks"] = head["num_blocks"]
        into["num_planned"] = head["num_steps"]
        into["prefix_queries"], into["prefix_hits"] = self._prefix
        for name in ("num_running", "num_waiting", "num_free_blocks", "num_preemptions", "decodes_since_look"):
            into[name] = head[name]
        writer.running[:num_running] = state.running[:num_running]
        if num_waiting:
            places = (int(head["waiting_head"][0]) + np.arange(num_waiting)) % len(state.waiting)
            writer.waiting[:num_waiting] = state.waiting[places]
        self._copy_steps(writer, head)
        self._copy_requests(writer)
        writer.publish()

    def _copy_steps(self, writer: Writer, head: np.ndarray) -> None:
        state, num_in_flight, oldest = self._engine.state, int(head["num_in_flight"][0]), int(head["oldest"][0])
        writer.state["num_in_flight"] = num_in_flight
        steps, batch = state.steps.view(np.ndarray), state.batch.view(np.ndarray)
        for place in range(num_in_flight):
            index = (oldest + place) % 2
            num_scheduled = int(steps["num_scheduled"][index])
            writer.state["num_scheduled"][0, place] = num_scheduled
            writer.state["start_s"][0, place] = steps["start_s"][index]
            writer.batch[place, :num_scheduled] = batch[index, :num_scheduled]

    def _copy_requests(self, writer: Writer) -> None:
        rows, live = self._engine.state.requests.view(np.ndarray), writer.live
        for name in COPIED:
            live[name] = rows[name]
        if self._names is not None:
            self._copy_hashes(writer, rows)
            self._copy_tables(writer)
            writer.blocks["content"] = self._names.of_blocks()
            writer.blocks["reuse"] = self._names.reuse_of_blocks()

    def _copy_hashes(self, writer: Writer, rows: np.ndarray) -> None:
        """Tell the hashes of those blocks whose tokens are known by now: the answer's are not known ahead."""
        live = writer.live
        known = (rows["prompt_tokens"] + rows["output_tokens"]) // self._engine.config.block_size
        known = np.where(live["serial"] > 0, np.minimum(known, rows["num_hashes"]), 0)
        for slot in np.flatnonzero(known > live["num_hashes"]).tolist():
            start = int(live["num_hashes"][slot])
            writer.put_hashes(slot, self._hashes[slot][start : known[slot]], start)
        live["num_hashes"] = known

    def _copy_tables(self, writer: Writer) -> None:
        tables, live = self._engine.state.tables, writer.live
        if tables.shape != self._tables.shape:
            self._tables = np.full_like(tables, NOBODY)
        held = np.maximum(live["num_blocks"], live["full_blocks"])
        width = min(int(held.max()), tables.shape[1])
        changed = (tables[:, :width] != self._tables[:, :width]).any(axis=1)
        for slot in np.flatnonzero(changed & (live["serial"] > 0)).tolist():
            writer.put_blocks(slot, tables[slot, : held[slot]])
            self._tables[slot] = tables[slot]

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            say(log, logging.ERROR, "state file given up", reason=error.strerror or str(error))
            self.close()
