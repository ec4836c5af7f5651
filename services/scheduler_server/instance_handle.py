"""One instance's sidecar as a scheduler sees it: whether to ask it, what it said last, and its promises."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate_ranking import Candidate, CandidateStatus
from scheduler.instance_table import InstanceTable
from scheduler.reservation_versions import ReservationVersions
from services.instances import Instance
from services.logs import log_event
from services.placement.settings import SchedulerSettings
from services.rpc.messages import indicators_from
from services.scheduler_server.circuit_breaker import CircuitBreaker
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.replies import (
    FAILURES,
    STATES,
    SidecarError,
    fate_of,
    note_of,
    prediction_in,
    require_sensible,
)
from services.scheduler_server.sidecar_connection import RELEASE_S, UNREACHED, ForecastCall, SidecarConnection
from services.supervised_task import supervised

log = logging.getLogger(__name__)

READY = common_pb2.INSTANCE_STATE_READY
USUAL_BLOCK_TOKENS = 16


class InstanceHandle:
    """What is known of one instance, and how it is reached; all of it may be forgotten without harm."""

    def __init__(
        self,
        instance: Instance,
        node: SidecarConnection,
        settings: SchedulerSettings,
        measures: SchedulerMetrics,
        table: InstanceTable,
    ) -> None:
        """Know nothing yet of an instance whose sidecar answers at a node."""
        self.instance = instance
        self.node = node
        self.name = instance.instance_id
        self.message = instance_message(instance)
        self.engine = settings.circuit()  # of the engine itself, as those find it who send requests there
        self.versions = ReservationVersions()
        self.state = READY  # as it tells by itself
        self.unseen = 0  # requests sent there without a promise since it was last heard
        self._trust = CircuitBreaker(self.name, settings.circuit(), measures)  # in what it says, if it can be reached
        self._settings = settings
        self._deadline_s = settings.sidecar_deadline_s
        self._measures = measures
        self._indicators: Mapping[str, float] = {}
        self._heard_s = self._age_s = 0.0
        self._table, self._troubled = table, node.troubled
        self._watching: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        if not self.is_well():
            self._troubled.add(self.name)

    @property
    def pace(self) -> float:
        """Real over predicted step time, as it was told last."""
        return self._indicators.get("pace") or 1.0

    # Whether to ask.

    def is_well(self) -> bool:
        """Tell whether there is no reason not to send requests there."""
        broken = self.node.trust.is_lost() or self._trust.is_lost() or self.engine.is_open()
        return not (broken or self.instance.state == "draining" or self.state in STATES)

    def engine_failed(self) -> None:
        """Note that a request that was sent there failed."""
        self.engine.failed(time.monotonic())
        self._troubled.add(self.name)

    def may_be_asked(self) -> bool:
        """Tell whether to ask it; where it failed lately, see in the background whether it answers again."""
        lost = [trust for trust in (self.node.trust, self._trust) if trust.is_lost()]
        if lost and all(trust.allows_trial() for trust in lost):
            self.start(self._probe())  # no decision waits for this
        return not lost

    async def _probe(self) -> None:
        asked = self.node.ask(b"", [self.name])
        await asyncio.wait([asked.answer], timeout=self._deadline_s)
        try:
            self._take(asked.response_of(self.name))
        except FAILURES as error:
            self.disregard(asked)
            self._failed(fate_of(error))
            log_event(log, logging.DEBUG, "sidecar is still not well", instance=self.name, reason=note_of(error))
        self.node.note(asked)

    def _failed(self, fate: CandidateStatus) -> None:
        """Count a failure; what it says is not believed for a while after one too many."""
        self._measures.sidecar_failures.labels(self.name, fate.value).inc()
        self._troubled.add(self.name)
        if fate not in UNREACHED:
            self._trust.failed(fate.value)

    # Asking.

    def as_known(self, fate: CandidateStatus = CandidateStatus.UNASKED, note: str = "") -> Candidate:
        """Tell what is known of the instance without asking."""
        return Candidate(
            instance_id=self.name,
            fate=fate,
            note=note,
            indicators=self._indicators,
            age_s=self._age_s + (time.monotonic() - self._heard_s) if self._indicators else 0.0,
            unseen=self.unseen,
        )

    def hear(self, asked: ForecastCall, candidate: Candidate, request_id: str) -> None:
        """Note in a candidate what came of a question about one request."""
        if not asked.answer.done():
            self.disregard(asked)
        try:
            response = asked.response_of(self.name)
            down = response.state in STATES and not response.predictions  # where there is no engine, none is foreseen
            forecast, refusal = (None, "") if down else prediction_in(response, request_id)
            self._take(response)
        except FAILURES as error:
            candidate.fate, candidate.note = fate_of(error), note_of(error)
            if candidate.fate is not CandidateStatus.REFUSED:
                self._failed(candidate.fate)
            return
        candidate.indicators, candidate.age_s, candidate.unseen = self._indicators, self._age_s, self.unseen
        candidate.version, candidate.epoch, candidate.forecast = response.version, response.epoch, forecast
        if refusal:
            candidate.fate, candidate.note = CandidateStatus.REFUSED, refusal
        elif response.state in STATES:
            candidate.fate, candidate.note = STATES[response.state]
        else:
            candidate.fate = CandidateStatus.FORECAST

    def disregard(self, asked: ForecastCall) -> None:
        """Take at least the indicators from an answer that nobody waits for any more."""
        asked.answer.add_done_callback(lambda _: self._too_late(asked))

    def _too_late(self, asked: ForecastCall) -> None:
        if asked.fate() is not None or self.node.trust.is_lost() or self._trust.is_lost():
            return
        try:
            self._take_indicators(asked.response_of(self.name))
        except FAILURES as error:
            log_event(log, logging.DEBUG, "late and wrong", instance=self.name, reason=str(error))

    def _take(self, response: predictor_pb2.PredictResponse | predictor_pb2.ReserveResponse) -> None:
        """Keep what an answer in time tells of the instance; ValueError where it makes no sense."""
        self._take_indicators(response)
        self.versions.hear(response.version, response.epoch)
        self._trust.succeeded()

    def _take_indicators(
        self, response: predictor_pb2.PredictResponse | predictor_pb2.ReserveResponse | common_pb2.ReleaseResponse
    ) -> None:
        if response.HasField("indicators"):
            self._keep(indicators_from(response.indicators), response.indicators.age_s)

    def _keep(self, indicators: Mapping[str, float], age_s: float) -> None:
        self._indicators, self._age_s, self._heard_s = indicators, age_s, time.monotonic()
        self.unseen = 0
        if self._watching is not None:  # else nobody reads the table
            self._tell_table()

    def _tell_table(self) -> None:
        if self.name in self._table.place_of:  # it may have gone meanwhile
            self._table.tell(self.name, self._indicators, self._heard_s, self._age_s)

    # What it tells by itself.

    def watch(self, interval_s: float) -> None:
        """Have it tell of itself whenever something changes, as often as this at most."""
        if self._watching is None:
            self._watching = asyncio.create_task(
                supervised(f"listening to {self.name}", partial(self._follow, interval_s))
            )
            if self._indicators:
                self._tell_table()

    async def _follow(self, interval_s: float) -> None:
        """Listen as long as it talks; call again after a pause that grows until it does."""
        pause_s = self._settings.first_pause_s
        while True:
            try:
                question = predictor_pb2.WatchRequest(min_interval_s=interval_s, instance_id=self.name)
                async for message in self.node.watch(question):
                    self._told(message)
                    pause_s = self._settings.first_pause_s
            except FAILURES as error:
                log_event(log, logging.DEBUG, "tells nothing", instance=self.name, reason=note_of(error))
            self.state = READY  # as far as is known
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.longest_pause_s)

    def _told(self, message: predictor_pb2.WatchResponse) -> None:
        if message.instance_id != self.name:
            raise ValueError(f"instance_id: {message.instance_id!r} answers there")
        told = indicators_from(message.indicators)
        self._keep(told if message.full else {**self._indicators, **told}, message.indicators.age_s)
        self.versions.hear(message.version, message.epoch)
        self.state = message.state
        if self.state in STATES:
            self._troubled.add(self.name)

    # Promises.

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Promise a request to the instance; who decides meanwhile counts it already. SidecarError: it is not."""
        with self.versions.claimed(request.if_version if request.HasField("if_version") else None):
            try:
                response = await self._promised(request)
                require_sensible(response, request, self.name)
                self._take(response)
                if response.result == predictor_pb2.RESERVE_RESULT_REFUSED and response.state in STATES:
                    self.engine_failed()
            except asyncio.CancelledError:
                self.forget(request.request.request_id)
                raise
            except FAILURES as error:
                fate = fate_of(error)
                if fate is not CandidateStatus.REFUSED:
                    self.node.note_fate(fate)
                    self._failed(fate)
                    self.forget(request.request.request_id)
                raise SidecarError(fate, note_of(error)) from None
        return response

    async def _promised(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        tokens = request.request.prompt_tokens
        blocks = -(-tokens // USUAL_BLOCK_TOKENS)
        if self.name not in self._table.place_of:  # it has gone meanwhile
            return await self.node.reserve(request)
        with self._table.on_its_way(self.name, time.monotonic(), prefill_tokens=tokens, blocks=blocks):
            return await self.node.reserve(request)

    def sent_without_promise(self, request: common_pb2.Request) -> None:
        """Count a request that goes there although nobody has promised it a place."""
        self.unseen += 1
        if self.name in self._table.place_of:
            self._table.sent(self.name, time.monotonic(), prefill_tokens=request.prompt_tokens)

    def forget(self, request_id: str) -> None:
        """Take back a promise that may have been made, in the background."""
        self.start(self.release(common_pb2.ReleaseRequest(request_id=request_id, instance_id=self.name)))

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a promise, and tell what became of it; where nobody answers, there was none or it will expire."""
        try:
            response = await self.node.release(request)
            self._take_indicators(response)
        except FAILURES as error:
            if (fate := fate_of(error)) is not CandidateStatus.REFUSED:
                self.node.note_fate(fate)
                self._failed(fate)
            log_event(
                log, logging.DEBUG, "not released", request_id=request.request_id, instance=self.name,
                reason=note_of(error),
            )  # fmt: skip
            return common_pb2.ReleaseResponse()
        return response

    # The end.

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Listen no more, and finish what is under way."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)
        self._trust.forget()


def instance_message(instance: Instance) -> common_pb2.Instance:
    """Write an instance down."""
    draining = instance.state == "draining"
    return common_pb2.Instance(
        instance_id=instance.instance_id,
        engine_url=instance.engine_url,
        sidecar_address=instance.sidecar_address,
        models=instance.models,
        state=common_pb2.INSTANCE_STATE_DRAINING if draining else common_pb2.INSTANCE_STATE_READY,
    )
