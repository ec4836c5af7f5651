"""One instance as a scheduler uses it: its status in the decision core, and the calls to its sidecar."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.backoff import Backoff
from scheduler.candidate import CandidateStatus
from scheduler.instances import NOT_READY, InstanceDirectory, InstanceStatus
from scheduler.intentions import Answer
from scheduler.prefix.prompt import DEFAULT_BLOCK_TOKENS
from services.instances.instance import DRAINING, Instance
from services.logs import log_event
from services.placement.circuit_breaker import CircuitBreaker
from services.placement.metrics import SchedulerMetrics
from services.placement.replies import FAILURES, answer_of, note_of, require_consistent, state_name, status_of
from services.placement.settings import SchedulerSettings
from services.placement.sidecar_connection import RELEASE_S, UNREACHABLE, ForecastCall, SidecarConnection
from services.rpc.messages import adapters_from, indicators_from
from services.supervised_task import supervised

log = logging.getLogger(__name__)


class ReserveError(Exception):
    """The call to reserve failed, so that it is unknown whether there is a reservation."""

    def __init__(self, status: CandidateStatus, note: str) -> None:
        """Keep the status and the note for the candidate."""
        super().__init__(note)
        self.status = status
        self.note = note


class InstanceHandle:
    """Asks, reserves at, releases at and watches one instance; keeps its status up to date."""

    def __init__(
        self,
        instance: Instance,
        connection: SidecarConnection,
        settings: SchedulerSettings,
        metrics: SchedulerMetrics,
        instances: InstanceDirectory,
    ) -> None:
        """Start without knowing anything about an instance whose sidecar is reached by a connection."""
        self.instance = instance
        self.connection = connection
        self.name = instance.instance_id
        self.message = instance_message(instance)
        self.status = InstanceStatus(
            instance_id=self.name,
            models=instance.models,
            role=instance.role,
            tier_tpot_s=instance.tier_tpot_s,
            tier_closed=instance.tier_closed,
            is_draining=instance.state == DRAINING,
            connection=connection.breaker.state,
            sidecar=settings.circuit(),
            engine=settings.circuit(),
        )
        self._breaker = CircuitBreaker(self.name, self.status.sidecar, metrics)
        self._instances = instances
        self._settings = settings
        self._metrics = metrics
        self._watching: asyncio.Task[None] | None = None
        self._interval_s = math.inf  # between its reports
        self._reported: Mapping[str, float] = {}  # by itself, as of its last report
        self.is_silent = False  # it should report, and does not
        self._background: set[asyncio.Task[Any]] = set()

    def take_changes_of(self, instance: Instance) -> bool:
        """Take tier and state of the instance in a new list; return False where something else of it changed."""
        known = self.instance
        kept = replace(
            known,
            tier=instance.tier,
            tier_tpot_s=instance.tier_tpot_s,
            tier_closed=instance.tier_closed,
            state=instance.state,
            drain=instance.drain,
        )
        if kept != instance:
            return False
        self.instance, self.message = instance, instance_message(instance)
        self.status.tier_tpot_s, self.status.tier_closed = instance.tier_tpot_s, instance.tier_closed
        self.status.is_draining = instance.state == DRAINING
        return True

    # Health.

    def probe_if_due(self) -> None:
        """Call the sidecar in the background, where its circuit is open and lets a trial through."""
        open_breakers = [one for one in (self.connection.breaker, self._breaker) if one.is_open()]
        if open_breakers and all(one.allows_trial() for one in open_breakers):
            self.start(self._probe())

    async def _probe(self) -> None:
        call = self.connection.ask(b"", (self.name,))
        await asyncio.wait([call.reply], timeout=self._settings.sidecar_deadline_s)
        try:
            self._take(call.response_of(self.name))
        except FAILURES as error:
            self.ignore(call)
            self._failed(status_of(error))
            log_event(log, logging.DEBUG, "sidecar probe failed", instance=self.name, reason=note_of(error))
        self.connection.note(call)

    def _failed(self, status: CandidateStatus) -> None:
        """Count a failure; one too many opens the sidecar's own circuit."""
        self._metrics.sidecar_failures.labels(self.name, status.value).inc()
        self._instances.suspect(self.name)
        if status not in UNREACHABLE:
            self._breaker.failed(status.value)

    # Forecasts.

    def answer(self, call: ForecastCall, request_id: str, answered_s: float) -> Answer:
        """Return what the instance answered to a call about one request."""
        if not call.reply.done():
            self.ignore(call)
        try:
            response = call.response_of(self.name)
            answer = answer_of(response, request_id, answered_s)
            self._take(response)
        except FAILURES as error:
            status = status_of(error)
            if status is not CandidateStatus.REFUSED:
                self._failed(status)
            return Answer(status, note=note_of(error))
        return answer

    def ignore(self, call: ForecastCall) -> None:
        """Take at least the indicators from a reply that comes too late."""
        call.reply.add_done_callback(lambda _: self._take_late(call))

    def _take_late(self, call: ForecastCall) -> None:
        if call.failure() is not None or self.connection.breaker.is_open() or self._breaker.is_open():
            return
        try:
            self._take_indicators(call.response_of(self.name))
        except FAILURES as error:
            log_event(log, logging.DEBUG, "invalid late reply dropped", instance=self.name, reason=str(error))

    def _take(self, response: predictor_pb2.PredictResponse | predictor_pb2.ReserveResponse) -> None:
        """Keep what a timely reply reports about the instance; ValueError where it is malformed."""
        self._take_indicators(response)
        self.status.versions.report(response.version, response.epoch)
        self._breaker.succeeded()

    def _take_indicators(
        self, response: predictor_pb2.PredictResponse | predictor_pb2.ReserveResponse | common_pb2.ReleaseResponse
    ) -> None:
        if response.HasField("indicators"):
            self._keep(response.indicators, indicators_from(response.indicators))

    def _keep(self, message: common_pb2.Indicators, indicators: Mapping[str, float]) -> None:
        status = self.status
        status.indicators, status.age_s, status.reported_s = indicators, message.age_s, time.monotonic()
        if self.name in self._instances.table.row_of:
            self._instances.table.set_adapters(self.name, adapters_from(message))
        status.num_unseen = 0
        if self._watching is not None:  # otherwise no policy reads the table
            self._update_table()

    def _update_table(self) -> None:
        if self.name in self._instances.table.row_of:  # it may have been removed meanwhile
            self._instances.table.replace(self.name, self.status.indicators, self.status.reported_s, self.status.age_s)

    # What it reports by itself.

    def watch(self, interval_s: float, *, after_s: float = 0.0) -> None:
        """Have it report every change from a time on, at most once per interval; with an infinite one, not at all."""
        if 0.5 <= interval_s / self._interval_s <= 2 or interval_s == self._interval_s:
            return
        self._interval_s = interval_s
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if interval_s == math.inf:
            self.status.reported_state = "ready"  # as far as is known
            self.is_silent = False
            return
        self._watching = asyncio.create_task(
            supervised(f"watch of {self.name}", partial(self._follow, interval_s, after_s))
        )
        if self.status.indicators:
            self._update_table()

    async def _follow(self, interval_s: float, after_s: float) -> None:
        """Follow its reports; call again after a pause that grows while calls fail."""
        await asyncio.sleep(after_s)
        backoff = Backoff(
            first_s=self._settings.first_pause_s, max_s=self._settings.longest_pause_s, random=random.random
        )
        while True:
            try:
                request = predictor_pb2.WatchRequest(min_interval_s=interval_s, instance_id=self.name)
                await self.connection.watch(request, partial(self._take_report, backoff))
            except FAILURES as error:
                log_event(log, logging.DEBUG, "watch ended", instance=self.name, reason=note_of(error))
            self.status.reported_state = "ready"  # as far as is known
            self.is_silent = True
            await asyncio.sleep(backoff.next_s())

    def _take_report(self, backoff: Backoff, message: predictor_pb2.WatchResponse) -> None:
        if message.instance_id != self.name:
            raise ValueError(f"instance_id: {message.instance_id!r} answers there")
        self.is_silent = False
        changed = indicators_from(message.indicators)
        # a report has what changed since the last one: a reply between them, which may be older, must not stay
        self._reported = changed if message.full else {**self._reported, **changed}
        self._keep(message.indicators, self._reported)
        self.status.versions.report(message.version, message.epoch)
        self.status.reported_state = state_name(message.state)
        if self.status.reported_state in NOT_READY:
            self._instances.suspect(self.name)
        backoff.reset()

    # Reservations.

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Reserve; other decisions count the request as soon as the call is in flight. ReserveError where it fails."""
        with self.status.versions.claimed(request.if_version if request.HasField("if_version") else None):
            try:
                response = await self._reserve(request)
                require_consistent(response, request, self.name)
                self._take(response)
                if response.result == predictor_pb2.RESERVE_RESULT_REFUSED and state_name(response.state) in NOT_READY:
                    self._instances.engine_failed(self.name, time.monotonic())
            except asyncio.CancelledError:
                self.forget(request.request.request_id)
                raise
            except FAILURES as error:
                status = status_of(error)
                if status is not CandidateStatus.REFUSED:
                    self.connection.note_failure(status)
                    self._failed(status)
                    self.forget(request.request.request_id)
                raise ReserveError(status, note_of(error)) from None
        return response

    async def _reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        table = self._instances.table
        if self.name not in table.row_of:  # it was removed meanwhile
            return await self.connection.reserve(request)
        prompt_tokens = request.request.prompt_tokens
        blocks = -(-prompt_tokens // DEFAULT_BLOCK_TOKENS)
        tokens = 0 if request.request.leg == common_pb2.LEG_DECODE else prompt_tokens  # these are computed elsewhere
        with table.in_flight(self.name, time.monotonic(), prefill_tokens=tokens, blocks=blocks):
            return await self.connection.reserve(request)

    def sent_without_reservation(self, prompt_tokens: int) -> None:
        """Count a request that goes there although it is not reserved."""
        self.status.num_unseen += 1
        if self.name in self._instances.table.row_of:
            self._instances.table.sent(self.name, time.monotonic(), prefill_tokens=prompt_tokens)

    def forget(self, request_id: str) -> None:
        """Release, in the background, a reservation that may have been made."""
        self.start(self.release(common_pb2.ReleaseRequest(request_id=request_id, instance_id=self.name)))

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a reservation, and report the outcome; if the call fails, there is none or it will expire."""
        try:
            response = await self.connection.release(request)
            self._take_indicators(response)
        except FAILURES as error:
            if (status := status_of(error)) is not CandidateStatus.REFUSED:
                self.connection.note_failure(status)
                self._failed(status)
            log_event(
                log, logging.DEBUG, "release failed", request_id=request.request_id, instance=self.name,
                reason=note_of(error),
            )  # fmt: skip
            return common_pb2.ReleaseResponse()
        return response

    # The end.

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Stop watching, and finish what is in flight."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)
        self._breaker.close()


def instance_message(instance: Instance) -> common_pb2.Instance:
    """Convert an instance to its wire form."""
    draining = instance.state == DRAINING
    return common_pb2.Instance(
        instance_id=instance.instance_id,
        engine_url=instance.engine_url,
        sidecar_address=instance.sidecar_address,
        models=instance.models,
        state=common_pb2.INSTANCE_STATE_DRAINING if draining else common_pb2.INSTANCE_STATE_READY,
        role=instance.role,
        tier=instance.tier,
        tier_tpot_s=instance.tier_tpot_s if instance.tier_tpot_s < math.inf else None,
        tier_closed=instance.tier_closed,
        drain=None if instance.drain is None else instance.drain.message(),
        data_parallel_rank=instance.data_parallel_rank,
    )
