"""The engine model on the wall clock: requests arrive at any time, tokens are ready when their steps end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.request import CLASSES, RequestFacts, Slo
from predictor.state import FINISHED, NONE, STEP
from services.emulator.clock import EngineClock, Pace
from services.emulator.errors import VllmError, bad_value, busy
from services.emulator.exporter import ContentHashes, EngineStateExporter
from services.emulator.jobs import Job
from services.emulator.metrics import ABORTED, EngineMetrics, Gauges
from services.emulator.openai import CHAT, ParsedRequest
from services.emulator.tokens import content_hashes
from services.logs import log_event

log = logging.getLogger(__name__)

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

Ended = tuple[float, ...]


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
        exporter_with: Callable[[ContentHashes | None], EngineStateExporter] | None = None,
    ) -> None:
        """Combine the parts; `run` starts the engine."""
        self.engine = engine
        self.clock = clock
        self.pace = pace
        self.metrics = metrics
        self.failure: VllmError | None = None
        self._contents = ContentHashes(engine) if engine.state.engine[0].prefix_caching else None
        self._exporter = exporter_with(self._contents) if exporter_with else None
        self._max_jobs = max_num_queued_reqs
        self._jobs: dict[int, Job] = {}  # by slot
        self._ending: list[tuple[Job, str]] = []  # removed once no step under way contains them
        self._serial = 0
        self._next_pace = pace.next()
        self._under_way: deque[Ended] = deque()  # rows of the launched steps for the state file, with their ends
        self._wake_up: asyncio.Future[None] | None = None
        self._bind_arrays()

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
        )

    def submit(self, request: ParsedRequest) -> Job:
        """Add a request now; VllmError where the engine cannot take it."""
        if self.failure is not None:
            raise self.failure
        if self.num_jobs >= self._max_jobs:
            self.metrics.refused(request.priority, self._service_facts(request.facts))
            raise busy()
        self._serial += 1
        engine_id = f"chatcmpl-{request.request_id}" if request.kind == CHAT else f"cmpl-{request.request_id}-0"
        engine_id = f"{engine_id}-{self._serial & 0xFFFFFFFF:08x}"
        hashes: tuple[int, ...] = ()
        if self._contents is not None:
            hashes = content_hashes([*request.prompt, *request.answer.token_ids()], self.engine.config.block_size)
            self._contents.learn(hashes)
        arrival_s = self.clock.now_s()
        try:
            slot = self.engine.add(
                RequestFacts(
                    request_id=engine_id,
                    model=request.model,
                    prompt_tokens=len(request.prompt),
                    output_tokens=request.answer.num_tokens,
                    max_tokens=request.max_tokens,
                    priority=request.priority,
                    arrival_s=arrival_s,
                    prefix_hashes=hashes,
                    min_tokens=request.min_tokens or None,
                    **self._service_facts(request.facts),
                )
            )
        except ValueError as error:
            raise bad_value(str(error)) from None
        self._bind_arrays()
        self._seen[slot] = 0
        job = self._jobs[slot] = Job(request=request, engine_id=engine_id, slot=slot, serial=self._serial)
        if self._exporter is not None:
            self._exporter.arrived(job, hashes)
        if self._head["num_in_flight"][0] < self.engine.config.pipeline_depth:
            self._wake()
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
        except Exception:
            log.exception("engine failed")
            self.failure = VllmError(500, "The engine has failed.")
            for job in self._jobs.values():
                job.failure = self.failure
                job.changed.set()

    def close(self) -> None:
        """Remove the state file."""
        if self._exporter is not None:
            self._exporter.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake_up = loop.create_future()
            self._update()
            timer = None
            if self._head["num_in_flight"][0] and not self.clock.is_held:
                delay_s = self.clock.wall_s(self._end_of_oldest_s()) - time.monotonic()
                # timers count whole milliseconds; one that fires too early would have to be set again
                timer = loop.call_later(max(0.0, math.ceil(delay_s * 1000) / 1000), self._wake)
            await self._wake_up
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        """Update the engine now."""
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)

    def _update(self) -> None:
        """Advance the engine to the present, hand out tokens, and publish the state."""
        if not self.clock.is_held:
            self._skip_stopped_time()
            self._advance(self.clock.now_s())
            self._deliver()
        self._remove_ended()
        if self._exporter is not None and not self.clock.is_held:
            self._exporter.publish()

    def _skip_stopped_time(self) -> None:
        """After a long stop, of the process for example, continue as if no time had passed."""
        if self._head["num_in_flight"][0]:
            due_s = self._end_of_oldest_s()
            late_s = time.monotonic() - self.clock.wall_s(due_s)
            if late_s > MAX_LAG_S:
                log_event(log, logging.WARNING, "clock set back", late_s=late_s)
                self.clock.set_back(due_s)

    def _advance(self, now_s: float) -> None:
        """Run the engine one step at a time: each has its own pace and is recorded."""
        engine, head = self.engine, self._head
        while True:
            num_planned = int(head["num_steps"][0])
            head["pace"] = self._next_pace
            head["steady"] = 0  # repeated steps would not be recorded
            engine.drive(engine.state, now_s, num_planned + 1, NONE)
            self._record_ended()
            if int(head["num_steps"][0]) == num_planned:
                return
            self._note_launched(num_planned)
            self._next_pace = self.pace.next()
            is_full = int(head["num_in_flight"][0]) == engine.config.pipeline_depth
            if is_full and self._end_of_oldest_s() > now_s:
                return

    def _note_launched(self, number: int) -> None:
        index = (int(self._head["oldest"][0]) + int(self._head["num_in_flight"][0]) - 1) % 2
        start_s, end_s, *counts = RECORDED(self._steps[index].item())
        self._under_way.append((end_s, number, start_s, end_s - start_s, *counts))

    def _record_ended(self) -> None:
        now_s = float(self._head["now_s"][0])
        while self._under_way and self._under_way[0][0] <= now_s:
            _, *row = self._under_way.popleft()
            self.metrics.step(int(row[3]), int(row[4]))
            if self._exporter is not None:
                self._exporter.stepped(tuple(row))

    def _deliver(self) -> None:
        """Hand out the tokens that are ready since the last call."""
        rows, seen = self._rows, self._seen
        changed = np.flatnonzero(rows["output_tokens"] != seen)
        if not len(changed):
            return
        now_s = float(self._head["now_s"][0])
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
            self._ending.append((job, job.request.answer.finish_reason))

    def _note_first(self, slots: np.ndarray) -> None:
        rows = self._rows[slots]
        for slot, num_hits in zip(slots.tolist(), rows["hit_tokens"].tolist(), strict=True):
            self._jobs[slot].cached_tokens = num_hits
        num_prompt_tokens, num_hit_tokens = int(rows["prompt_tokens"].sum()), int(rows["hit_tokens"].sum())
        self.metrics.first_tokens(rows["first_token_s"] - rows["arrival_s"], num_prompt_tokens, num_hit_tokens)
        if self._exporter is not None:
            self._exporter.started(num_prompt_tokens, num_hit_tokens)

    def _remove_ended(self) -> None:
        """Remove requests that have ended, once no step under way contains them."""
        if not self._ending:
            return
        still = []
        for job, reason in self._ending:
            if self._rows["in_flight_tokens"][job.slot] > 0:
                still.append((job, reason))
                continue
            facts, outcome = self.engine.request_in(job.slot), self.engine.outcome(job.engine_id)
            self.engine.remove(job.engine_id)
            del self._jobs[job.slot]
            self.metrics.ended(facts, outcome, reason, job.request.max_tokens)
            if self._exporter is not None:
                self._exporter.ended(job, outcome, reason)
        self._ending = still

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
