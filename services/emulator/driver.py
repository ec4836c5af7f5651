"""The engine model on the wall clock: requests arrive at any time, tokens are ready when their steps end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.request import CLASSES, RequestFacts, Slo
from predictor.state import HELD, LOST, NONE, RUNNING, WAITING
from services.emulator.clock import EngineClock, Pace
from services.emulator.content_hashes import ContentHashes
from services.emulator.errors import VllmError, bad_value, busy
from services.emulator.exporter import EngineStateExporter
from services.emulator.job_table import JobTable
from services.emulator.jobs import Job
from services.emulator.kv_events import EmulatedKvEvents
from services.emulator.kv_transfers import EmulatedConnector, Fetch
from services.emulator.metrics import ABORTED, EngineMetrics, Gauges
from services.emulator.openai import ParsedRequest
from services.emulator.request_bodies import CHAT, MESSAGE
from services.emulator.speculation import DraftDraws
from services.emulator.state_arrays import StateArrays
from services.emulator.step_records import StepRecorder
from services.emulator.token_delivery import TokenDelivery
from services.emulator.tokens import content_hashes
from services.emulator.transfer_progress import TransferProgress
from services.kv_events.publisher import KvEventPublisher
from services.logs import log_event

log = logging.getLogger(__name__)

NUM_STAGES = LOST + 1
MAX_LAG_S = 1.0  # of wall clock; a process that was stopped for longer does not catch up


class Driver:
    """Runs an engine step by step as time passes; all within one event loop."""

    def __init__(  # noqa: PLR0913 - these are its parts
        self,
        engine: Engine,
        clock: EngineClock,
        pace: Pace,
        metrics: EngineMetrics,
        *,
        max_num_queued_reqs: int,
        connector: EmulatedConnector | None = None,
        draws: DraftDraws | None = None,
        exporter_with: Callable[[ContentHashes | None], EngineStateExporter] | None = None,
        kv_publisher: KvEventPublisher | None = None,
    ) -> None:
        """Combine the parts; `run` starts the engine."""
        self.engine = engine
        self.clock = clock
        self.pace = pace
        self.metrics = metrics
        self.connector = connector
        self.draws = draws  # of an engine with speculative decoding
        self.failure: VllmError | None = None
        self._contents = ContentHashes(engine) if engine.state.engine[0].prefix_caching else None
        exporter = exporter_with(self._contents) if exporter_with else None
        self._exporter = exporter
        self.kv_publisher = kv_publisher
        self._kv_events: EmulatedKvEvents | None = None
        if kv_publisher is not None and self._contents is not None:
            self._kv_events = EmulatedKvEvents(engine, self._contents, kv_publisher)
        self._max_jobs = max_num_queued_reqs
        self._serial = 0
        self._wake_up: asyncio.Future[None] | None = None
        self.woken: Callable[[], None] | None = None  # set by what runs this engine together with others
        self._arrays = arrays = StateArrays(engine)
        self.steps = StepRecorder(engine, arrays, pace, metrics, draws=draws, exporter=exporter)
        leases = None if connector is None else connector.leases
        self._jobs = JobTable(engine, arrays, metrics, exporter=exporter, leases=leases)
        self._delivery = TokenDelivery(arrays, self._jobs.by_slot, metrics, draws=draws, exporter=exporter)
        self._transfers: TransferProgress | None = None
        if connector is not None:
            self._transfers = TransferProgress(
                engine, arrays, clock, connector, jobs=self._jobs, metrics=metrics, exporter=exporter, wake=self._wake
            )

    num_ranks = 1

    @property
    def num_jobs(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._jobs)

    def gauges(self) -> Gauges:
        """Return the engine's gauges."""
        head, rows = self._arrays.head, self._arrays.rows
        num_blocks = max(1, self.engine.num_blocks)
        late_s = 0.0
        if self._arrays.num_in_flight and not self.clock.is_held:
            late_s = max(0.0, time.monotonic() - self.clock.wall_s(self._arrays.end_of_oldest_s))
        return Gauges(
            num_running=int(head["num_running"][0]),
            num_waiting=int(head["num_waiting"][0] + head["num_pending"][0]),
            kv_cache_usage=1 - int(head["num_free_blocks"][0]) / num_blocks,
            num_preemptions=int(head["num_preemptions"][0]),
            lag_s=late_s,
            num_by_stage=tuple(np.bincount(rows["stage"][rows["status"] == WAITING], minlength=NUM_STAGES)),
            running_adapters=self.adapters_of(RUNNING),
            waiting_adapters=self.adapters_of(WAITING),
            num_held=0 if self.connector is None else len(self.connector.leases),
        )

    def require_room(self, request: ParsedRequest) -> None:
        """Refuse a request that the engine cannot take now."""
        if self.failure is not None:
            raise self.failure
        if self.num_jobs + max(1, len(request.choices)) > self._max_jobs:
            self.metrics.refused(request.priority, self._service_facts(request.facts))
            raise busy()

    def submit(self, request: ParsedRequest, fetch: Fetch | None = None, *, arrived_s: float | None = None) -> Job:
        """Add a request now, a decode leg with its blocks on another engine; VllmError where it cannot be served.

        `arrived_s` is when the client's request arrived, where that was before.
        """
        try:
            self.require_room(request)
            job = self._add(request, arrived_s)
        except VllmError:
            if fetch is not None and self.connector is not None:
                self.connector.fetches.discard(fetch)
            raise
        if fetch is not None and self.connector is not None:
            self.connector.fetches.begin(job.engine_id, fetch)
        if self._arrays.num_in_flight < self.engine.config.pipeline_depth:
            self._wake()
        return job

    def _add(self, request: ParsedRequest, arrived_s: float | None) -> Job:
        self._serial += 1
        is_chat = request.kind in (CHAT, MESSAGE)
        usual = f"chatcmpl-{request.request_id}" if is_chat else f"cmpl-{request.request_id}-0"
        engine_id = f"{request.engine_name or usual}-{self._serial & 0xFFFFFFFF:08x}"
        hashes: tuple[int, ...] = ()
        if self._contents is not None:
            token_ids = [*request.prompt, *request.answer.token_ids()]
            hashes = content_hashes(token_ids, self.engine.config.block_size, request.lora, request.images)
            self._contents.learn(hashes)
            if self._kv_events is not None:
                self._kv_events.learn(token_ids)
        added_s = self.clock.now_s()
        try:
            slot = self.engine.add(
                RequestFacts(
                    request_id=engine_id,
                    model=request.model,
                    prompt_tokens=len(request.prompt),
                    output_tokens=request.answer.num_tokens,
                    max_tokens=request.max_tokens,
                    priority=request.priority,
                    arrival_s=added_s,
                    prefix_hashes=hashes,
                    min_tokens=request.min_tokens or None,
                    leg=request.leg,
                    adapter=request.adapter,
                    encoder_inputs=request.images,
                    **self._service_facts(request.facts),
                )
            )
        except ValueError as error:
            raise bad_value(str(error)) from None
        finally:
            self._arrays.bind()  # those of the engine may have grown, also for a request that it refuses
        self._delivery.start(slot)
        job = self._jobs.by_slot[slot] = Job(
            request=request,
            engine_id=engine_id,
            slot=slot,
            serial=self._serial,
            arrived_s=added_s if arrived_s is None else min(arrived_s, added_s),
        )
        if self._exporter is not None:
            self._exporter.arrived(job, hashes)
        return job

    def _service_facts(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Read what the client wants beside its tokens; its targets become spans of the engine's clock."""
        targets = {name: columns.get(f"{name.removesuffix('_s')}_slo_s") for name in ("ttft_s", "tpot_s")}
        scaled = {name: value * self.clock.speed for name, value in targets.items() if value is not None}
        return {
            "slo": Slo(**scaled) if scaled else None,
            "request_class": CLASSES[columns.get("request_class", 0)],
            **{name: columns[name] for name in ("weight", "client_id", "session_id") if name in columns},
        }

    def load_adapter(self, name: str) -> None:
        """Bring an adapter into memory, as vLLM does when it is added; the time that this takes is not emulated."""
        self.engine.load_adapter(name)
        self.steps.note_loads()

    def adapters_of(self, status: int) -> list[str]:
        """Return the names of the adapters of requests that run, or wait, in alphabetical order."""
        statuses = self._arrays.rows["status"]
        names = {job.request.adapter for slot, job in self._jobs.by_slot.items() if statuses[slot] == status}
        return sorted(names - {""})

    def abort(self, job: Job) -> None:
        """Abort a request; no effect on one that is over."""
        if job.is_over:
            return
        job.is_over = True
        job.changed.set()
        self.engine.abort(job.engine_id)
        self._jobs.end(job, ABORTED)
        self._wake()

    def hang(self, *, hangs: bool) -> None:
        """Stop the engine, or let it continue."""
        if hangs != self.clock.is_held:
            (self.clock.hold if hangs else self.clock.release)()
            self._wake()

    async def run(self) -> None:
        """Run the engine until cancelled."""
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001 - each request gets it
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Fail all requests: the engine has failed."""
        log.error("engine failed", exc_info=error)
        self.failure = VllmError(500, "The engine has failed.")
        for job in self._jobs.by_slot.values():
            job.failure = self.failure
            job.changed.set()

    def close(self) -> None:
        """Remove the state file."""
        if self._exporter is not None:
            self._exporter.close()
        if self.connector is not None:
            self.connector.fetches.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake_up = loop.create_future()
            self._update()
            timer = None
            due_s = self._due_s()
            if due_s < math.inf and not self.clock.is_held:
                delay_s = self.clock.wall_s(due_s) - time.monotonic()
                # timers count whole milliseconds; one that fires too early would have to be set again
                timer = loop.call_later(max(0.0, math.ceil(delay_s * 1000) / 1000), self._wake)
            await self._wake_up
            if timer is not None:
                timer.cancel()

    def _due_s(self) -> float:
        """Return when a step, a lease or a fetch ends, or a request arrives, next."""
        if not self._arrays.num_in_flight:
            return min(float(self._arrays.head["next_transfer_s"][0]), self._arrays.next_arrival_s)
        end_s = self._arrays.end_of_oldest_s
        # the other engine frees its blocks while this step goes on
        return end_s if self._transfers is None else min(end_s, self._transfers.next_end_s())

    def _wake(self) -> None:
        """Update the engine now."""
        if self.woken is not None:
            self.woken()
        elif self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    def _update(self) -> None:
        """Advance the engine to the present, hand out tokens, and publish the state."""
        if not self.clock.is_held:
            if self._arrays.num_in_flight:
                self.skip_stopped_time(self._arrays.end_of_oldest_s)
            now_s = self.clock.now_s()
            self.arrive_by(now_s)
            self._advance(now_s)
        self.hand_out()

    def hand_out(self) -> None:
        """Hand out tokens, and publish the state."""
        if not self.clock.is_held:
            for job in self._delivery.deliver():
                self._finished(job)
        if self._transfers is not None:
            self._transfers.follow()
            self._jobs.remove_released()
        self._jobs.remove_ended()
        if self.clock.is_held:
            return
        if self._kv_events is not None:
            self._kv_events.publish()
        if self._exporter is not None:
            if self.draws is not None:
                self._exporter.drafted(self.draws.counts)
            self._exporter.publish()

    def _finished(self, job: Job) -> None:
        job.is_over = True
        if self._transfers is not None and self._arrays.rows["stage"][job.slot] == HELD:
            self._transfers.hold(job)
        self._jobs.end(job, job.request.answer.finish_reason)

    def skip_stopped_time(self, due_s: float) -> None:
        """After a long stop, of the process for example, continue as if no time had passed since a step's end."""
        late_s = time.monotonic() - self.clock.wall_s(due_s)
        if late_s > MAX_LAG_S:
            log_event(log, logging.WARNING, "clock set back", late_s=late_s)
            self.clock.set_back(due_s)

    def arrive_by(self, time_s: float) -> None:
        """Have requests that came while the process was stopped arrive at this time at the latest."""
        for slot in self._arrays.arrive_by(time_s):
            if (job := self._jobs.by_slot[slot]).arrived_s > time_s:
                job.arrived_s = time_s
                if self._exporter is not None:
                    self._exporter.put_facts(job)

    def _advance(self, now_s: float) -> None:
        """Run the engine one step at a time: each has its own pace and is recorded."""
        engine, arrays = self.engine, self._arrays
        while True:
            num_planned = arrays.num_steps
            self.steps.set_next_pace()
            arrays.head["steady"] = 0  # repeated steps would not be recorded
            engine.drive(engine.state, now_s, num_planned + 1, NONE)
            self.steps.record_ended()
            if arrays.num_steps == num_planned:
                return
            self.steps.note_launched(num_planned)
            is_full = arrays.num_in_flight == engine.config.pipeline_depth
            if is_full and arrays.end_of_oldest_s > now_s:
                return

    def slow(self, factor: float) -> None:
        """Multiply the times of all steps."""
        self.pace.slow = factor
