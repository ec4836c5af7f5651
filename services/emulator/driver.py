"""The engine model on the wall clock: requests arrive at any time, tokens are ready when their steps end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.remote_kv import is_under_way
from predictor.request import CLASSES, RequestFacts, Slo
from predictor.state import FETCHING, FINISHED, HELD, LOST, NONE, RUNNING, STEP, TO_FETCH, WAITING
from services.emulator.clock import EngineClock, Pace
from services.emulator.errors import VllmError, bad_value, busy, not_fetched
from services.emulator.exporter import ContentHashes, EngineStateExporter
from services.emulator.jobs import Job
from services.emulator.kv_events import EmulatedKvEvents
from services.emulator.kv_transfers import EmulatedConnector, Fetch
from services.emulator.metrics import ABORTED, ERROR, EngineMetrics, Gauges
from services.emulator.openai import CHAT, MESSAGE, ParsedRequest
from services.emulator.speculation import DraftDraws
from services.emulator.tokens import content_hashes
from services.kv_events.publisher import KvEventPublisher
from services.logs import log_event

log = logging.getLogger(__name__)

NUM_STAGES = LOST + 1
MAX_LAG_S = 1.0  # of wall clock; a process that was stopped for longer does not catch up

# the fields of a step that a state file records
RECORDED = itemgetter(
    *map(
        list(STEP.names or ()).index,
        (
            "start_s", "end_s", "num_tokens", "num_sampled", "num_decodes", "num_prefills", "decode_context",
            "decode_longest", "prefill_qq", "prefill_qkv",
        ),
    )
)  # fmt: skip

Launched = tuple[float, tuple[float, ...], tuple[int, int]]  # its end, its row for the state file, adapters loaded


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
        self._exporter = exporter_with(self._contents) if exporter_with else None
        self.kv_publisher = kv_publisher
        self._kv_events: EmulatedKvEvents | None = None
        if kv_publisher is not None and self._contents is not None:
            self._kv_events = EmulatedKvEvents(engine, self._contents, kv_publisher)
        self._max_jobs = max_num_queued_reqs
        self._jobs: dict[int, Job] = {}  # by slot
        self._ending: list[tuple[Job, str]] = []  # removed once no step under way contains them
        self._held: list[Job] = []  # finished prefills whose blocks are held
        self._serial = 0
        self._next_pace = pace.next()
        self._under_way: deque[Launched] = deque()
        self._loads = (0, 0)  # of adapters so far, into host memory and into GPU slots
        self._wake_up: asyncio.Future[None] | None = None
        self.woken: Callable[[], None] | None = None  # set by what runs this engine together with others
        self._bind_arrays()
        if connector is not None:
            connector.leases.on_extended, connector.leases.on_released = self._extend_lease, self._release_held
            connector.fetches.on_lost = lambda _: self._wake()

    num_ranks = 1

    @property
    def num_jobs(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._jobs) - len(self._ending)

    def gauges(self) -> Gauges:
        """Return the engine's gauges."""
        head = self._head
        num_blocks = max(1, self.engine.num_blocks)
        late_s = 0.0
        if head["num_in_flight"][0] and not self.clock.is_held:
            late_s = max(0.0, time.monotonic() - self.clock.wall_s(self._end_of_oldest_s()))
        return Gauges(
            num_running=int(head["num_running"][0]),
            num_waiting=int(head["num_waiting"][0] + head["num_pending"][0]),
            kv_cache_usage=1 - int(head["num_free_blocks"][0]) / num_blocks,
            num_preemptions=int(head["num_preemptions"][0]),
            lag_s=late_s,
            num_by_stage=tuple(np.bincount(self._rows["stage"][self._rows["status"] == WAITING], minlength=NUM_STAGES)),
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
        if self._head["num_in_flight"][0] < self.engine.config.pipeline_depth:
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
        self._bind_arrays()
        self._seen[slot] = 0
        job = self._jobs[slot] = Job(
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
        self._loads = int(self._head["num_adapter_loads"][0]), int(self._head["num_adapter_activations"][0])

    def adapters_of(self, status: int) -> list[str]:
        """Return the names of the adapters of requests that run, or wait, in alphabetical order."""
        names = {job.request.adapter for slot, job in self._jobs.items() if self._rows["status"][slot] == status}
        return sorted(names - {""})

    def abort(self, job: Job) -> None:
        """Abort a request; no effect on one that is over."""
        if job.is_over:
            return
        job.is_over = True
        job.changed.set()
        self.engine.abort(job.engine_id)
        self._ending.append((job, ABORTED))
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
        for job in self._jobs.values():
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
        """Return when a step, a lease or a fetch ends next."""
        if not self._head["num_in_flight"][0]:
            return float(self._head["next_transfer_s"][0])
        due_s = self._end_of_oldest_s()
        if self.connector is not None:  # the other engine frees its blocks while this step goes on
            ends_s = (self._fetch_end_s(name, fetch) for name, fetch in self.connector.fetches.all())
            due_s = min((due_s, *ends_s))
        return due_s

    def _wake(self) -> None:
        """Update the engine now."""
        if self.woken is not None:
            self.woken()
        elif self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    def _update(self) -> None:
        """Advance the engine to the present, hand out tokens, and publish the state."""
        if not self.clock.is_held:
            if self._head["num_in_flight"][0]:
                self.skip_stopped_time(self._end_of_oldest_s())
            self._advance(self.clock.now_s())
        self.hand_out()

    def hand_out(self) -> None:
        """Hand out tokens, and publish the state."""
        if not self.clock.is_held:
            self._deliver()
        if self.connector is not None:
            self._follow_transfers(self.connector)
        self._remove_ended()
        if self.clock.is_held:
            return
        if self._kv_events is not None:
            self._kv_events.publish()
        if self._exporter is not None:
            if self.draws is not None:
                self._exporter.drafted(self.draws.counts)
            self._exporter.publish()

    def skip_stopped_time(self, due_s: float) -> None:
        """After a long stop, of the process for example, continue as if no time had passed since a step's end."""
        late_s = time.monotonic() - self.clock.wall_s(due_s)
        if late_s > MAX_LAG_S:
            log_event(log, logging.WARNING, "clock set back", late_s=late_s)
            self.clock.set_back(due_s)

    def _advance(self, now_s: float) -> None:
        """Run the engine one step at a time: each has its own pace and is recorded."""
        engine, head = self.engine, self._head
        while True:
            num_planned = int(head["num_steps"][0])
            self.set_next_pace()
            head["steady"] = 0  # repeated steps would not be recorded
            engine.drive(engine.state, now_s, num_planned + 1, NONE)
            self._record_ended()
            if int(head["num_steps"][0]) == num_planned:
                return
            self._note_launched(num_planned)
            is_full = int(head["num_in_flight"][0]) == engine.config.pipeline_depth
            if is_full and self._end_of_oldest_s() > now_s:
                return

    def set_next_pace(self) -> None:
        """Set the pace of the step that is planned next."""
        self._head["pace"] = self._next_pace

    def record(self, *, has_launched: bool) -> None:
        """Record the steps that have ended, and the one that was just launched, if any."""
        self._record_ended()
        if has_launched:
            self._note_launched(int(self._head["num_steps"][0]) - 1)

    def slow(self, factor: float) -> None:
        """Multiply the times of all steps."""
        self.pace.slow = factor

    def _note_launched(self, number: int) -> None:
        index = (int(self._head["oldest"][0]) + int(self._head["num_in_flight"][0]) - 1) % 2
        if self.draws is not None:
            self.draws.draw(self.engine.state, index)
        start_s, end_s, *counts = RECORDED(self._steps[index].item())
        loads, activations = self._loads
        self._loads = int(self._head["num_adapter_loads"][0]), int(self._head["num_adapter_activations"][0])
        new = self._loads[0] - loads, self._loads[1] - activations
        self._under_way.append((end_s, (number, start_s, end_s - start_s, *counts), new))
        self._next_pace = self.pace.next()

    def _record_ended(self) -> None:
        now_s = float(self._head["now_s"][0])
        while self._under_way and self._under_way[0][0] <= now_s:
            _, row, loads = self._under_way.popleft()
            # how many draft tokens are output is known when they are delivered
            self.metrics.step(int(row[3]), int(row[4]) if self.draws is None else 0)
            if self._exporter is not None:
                self._exporter.stepped(row, loads)

    def _deliver(self) -> None:
        """Hand out the tokens that are ready since the last call."""
        rows, seen = self._rows, self._seen
        changed = np.flatnonzero(rows["output_tokens"] != seen)
        if not len(changed):
            return
        now_s = float(self._head["now_s"][0])
        if self.draws is not None:
            self.metrics.generated(int((rows["output_tokens"][changed] - seen[changed]).sum()))
        for slot, num_ready in zip(changed.tolist(), rows["output_tokens"][changed].tolist(), strict=True):
            self._jobs[slot].set_ready(num_ready)
        first = changed[seen[changed] == 0]
        if len(first):
            self._note_first(first)
        later = changed[seen[changed] > 0]
        self.metrics.more_tokens(now_s - self._last_s[later])
        self._last_s[changed] = now_s
        seen[changed] = rows["output_tokens"][changed]
        for slot in changed[rows["status"][changed] == FINISHED].tolist():
            job = self._jobs[slot]
            job.is_over = True
            if rows["stage"][slot] == HELD and self.connector is not None:
                job.kv_transfer_params = self.connector.reply_params(
                    job.engine_id,
                    block_ids=self._block_ids(slot),
                    num_tokens=int(rows["computed_tokens"][slot]),
                    cached_tokens=job.cached_tokens,
                )
            self._ending.append((job, job.request.answer.finish_reason))

    def _note_first(self, slots: np.ndarray) -> None:
        rows = self._rows[slots]
        arrived_s = np.array([self._jobs[slot].arrived_s for slot in slots.tolist()])
        num_fetched_tokens = 0
        for slot, num_hits, num_prompt in zip(
            slots.tolist(), rows["hit_tokens"].tolist(), rows["prompt_tokens"].tolist(), strict=True
        ):
            job = self._jobs[slot]
            job.cached_tokens = num_hits
            if (remote := job.request.remote) is not None:
                job.cached_tokens = num_prompt if remote.cached_tokens is None else remote.cached_tokens
                num_fetched_tokens += num_prompt - num_hits
        num_prompt_tokens, num_hit_tokens = int(rows["prompt_tokens"].sum()), int(rows["hit_tokens"].sum())
        self.metrics.first_tokens(
            rows["first_token_s"] - arrived_s, num_prompt_tokens, num_hit_tokens, num_fetched_tokens
        )
        if self._exporter is not None:
            self._exporter.started(num_prompt_tokens, num_hit_tokens)

    def _remove_ended(self) -> None:
        """Remove requests that have ended, once no step under way contains them."""
        if not self._ending:
            return
        still = []
        for job, reason in self._ending:
            if self._rows["in_flight_tokens"][job.slot] > 0 or self.engine.fetch_end_s(job.engine_id) is not None:
                still.append((job, reason))
                continue
            facts = self.engine.request_in(job.slot)
            outcome = replace(self.engine.outcome(job.engine_id), arrival_s=job.arrived_s)
            del self._jobs[job.slot]
            self.metrics.ended(facts, outcome, reason, job.request.max_tokens)
            if self._exporter is not None:
                self._exporter.ended(job, outcome, reason)
            if self.engine.is_held(job.engine_id):
                self._held.append(job)
            else:
                self._remove(job)
        self._ending = still

    def _remove(self, job: Job) -> None:
        """Free the slot of a request that has ended, and whose blocks are free."""
        if self.connector is not None and job.engine_id in self.connector.leases:
            self.connector.leases.expire(job.engine_id)  # or the other engine would have ended it
        self.engine.remove(job.engine_id)
        if self._exporter is not None:
            self._exporter.removed(job)

    # KV blocks of other engines, and for them.

    def _follow_transfers(self, connector: EmulatedConnector) -> None:
        """Note fetches that have started, ended or failed, and leases that have ended."""
        rows, fetches = self._rows, connector.fetches
        for request_id, fetch in fetches.all():
            slot = self.engine.slots[request_id]
            stage, has_ended = int(rows["stage"][slot]), bool(rows["status"][slot] == FINISHED)
            if stage == FETCHING and fetch.started_s is None:
                fetch.started_s = float(self._head["now_s"][0])
                if self._head["num_in_flight"][0] > 1:  # it starts with the younger step
                    fetch.started_s = max(fetch.started_s, self._end_of_oldest_s())
            if fetch.is_lost and (stage == FETCHING or (stage == TO_FETCH and not connector.recomputes)):
                self._fail_fetch(self._jobs[slot])
                fetches.fail(request_id)
            elif self._fetch_end_s(request_id, fetch) <= self.clock.now_s():
                fetches.discard(fetch)  # the engine knows it with its next step
            elif not is_under_way(stage) and (stage != TO_FETCH or has_ended):
                if fetch.started_s is not None:
                    config, num_tokens = self.engine.config, int(rows["prompt_tokens"][slot] - rows["hit_tokens"][slot])
                    self.metrics.fetched(
                        max(0.0, float(rows["transfer_s"][slot]) - fetch.started_s) / self.clock.speed,
                        num_tokens * config.kv_bytes_per_token,
                        -(-num_tokens // config.block_size),
                    )
                    if self._exporter is not None:
                        self._exporter.fetched()
                fetches.end(request_id)
        for job in [one for one in self._held if not self.engine.is_held(one.engine_id)]:
            self._held.remove(job)
            self._remove(job)

    def _fetch_end_s(self, request_id: str, fetch: Fetch) -> float:
        """Return when a fetch under way ends; infinity where the other engine knows it already."""
        if fetch.is_freed or not self.engine.is_fetching(request_id):
            return math.inf
        end_s = self.engine.fetch_end_s(request_id)
        return math.inf if end_s is None else end_s

    def _fail_fetch(self, job: Job) -> None:
        """End the fetch of a request whose blocks are lost: it fails, or computes its prompt here."""
        self.engine.end_fetch(job.engine_id, ok=False, at_s=self.clock.now_s())
        self._wake()  # it may be scheduled now, or others in its place
        assert self.connector is not None
        if self.connector.recomputes or job.is_over:
            return
        self.engine.abort(job.engine_id)
        job.is_over, job.failure = True, not_fetched()
        job.changed.set()
        self._ending.append((job, ERROR))

    def _extend_lease(self, request_id: str) -> None:
        """Hold blocks for longer, as the other engine still needs them."""
        assert self.connector is not None
        until_s = self.clock.now_s() + self.connector.extension_s * self.clock.speed
        self.engine.hold_until(request_id, max(until_s, float(self._rows["transfer_s"][self.engine.slots[request_id]])))

    def _release_held(self, request_id: str) -> None:
        """Free blocks that the other engine has fetched."""
        self.engine.release_held(request_id, at_s=self.clock.now_s())
        self._wake()

    def _block_ids(self, slot: int) -> list[int]:
        """Return the blocks of a request, as vLLM numbers them: its null block is 0."""
        num_blocks = int(self._rows["num_blocks"][slot])
        if not self.engine.tracks_blocks:
            return list(range(1, num_blocks + 1))
        return [block + 1 for block in self.engine.state.tables[slot, :num_blocks].tolist()]

    def _end_of_oldest_s(self) -> float:
        return float(self._steps["end_s"][int(self._head["oldest"][0])])

    def _bind_arrays(self) -> None:
        """Bind the engine's arrays, which it replaces when they grow."""
        state = self.engine.state
        self._head = state.engine.view(np.ndarray)
        self._steps = state.steps.view(np.ndarray)
        self._rows = state.requests.view(np.ndarray)
        if not hasattr(self, "_seen"):
            self._seen = np.zeros(len(self._rows), np.int64)
            self._last_s = np.zeros(len(self._rows))
        grown = len(self._rows) - len(self._seen)
        if grown:
            self._seen = np.concatenate((self._seen, np.zeros(grown, np.int64)))
            self._last_s = np.concatenate((self._last_s, np.zeros(grown)))
