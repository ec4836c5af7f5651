"""One instance's sidecar as a scheduler sees it: how to ask it, whether to, and what it said last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from predictor.forecast import Forecast
from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from scheduler.circuit import Circuit
from scheduler.dispatch import Candidate, Fate
from services.instances import Instance
from services.log_lines import say
from services.scheduler_server.line import PREDICT_STREAM, Line
from services.scheduler_server.measures import Measures
from services.scheduler_server.settings import SchedulerSettings
from services.wire import forecast_from, indicators_from

log = logging.getLogger(__name__)

RELEASE_S = 1.0  # deadline of what nobody waits for

# A sidecar that returns is to be seen within a second; one that is cut off silently, within half a minute.
CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

STATES = {
    common_pb2.INSTANCE_STATE_STARTING: (Fate.DRAINING, "is starting"),
    common_pb2.INSTANCE_STATE_DRAINING: (Fate.DRAINING, "is draining"),
    common_pb2.INSTANCE_STATE_DOWN: (Fate.STOPPED, "its engine is down"),
}

# What an error status says of who sent it; what is not here is a failure of its own.
CODES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Fate.LATE,
    grpc.StatusCode.FAILED_PRECONDITION: Fate.INVALID,  # somebody else answers there
    grpc.StatusCode.INVALID_ARGUMENT: Fate.REFUSED,  # the request's fault
}

Reserved = predictor_pb2.ReserveResponse


class SidecarError(Exception):
    """No answer, or none that makes sense."""

    def __init__(self, fate: Fate, note: str) -> None:
        """Say what it means for the instance."""
        super().__init__(note)
        self.fate = fate
        self.note = note


class Sidecar:
    """The way to one sidecar, and what is known of its instance; all of it may be forgotten without harm."""

    def __init__(self, instance: Instance, settings: SchedulerSettings, measures: Measures) -> None:
        """Make the channel; it connects by itself."""
        self.instance = instance
        self.message = instance_message(instance)
        self.indicators: Mapping[str, float] = {}
        self.unseen = 0  # requests sent there without a promise since it was last heard
        self.engine = Circuit(
            failures_to_open=settings.failures_to_open,
            first_pause_s=settings.first_pause_s,
            longest_pause_s=settings.longest_pause_s,
        )
        self._circuit = Circuit(
            failures_to_open=settings.failures_to_open,
            first_pause_s=settings.first_pause_s,
            longest_pause_s=settings.longest_pause_s,
        )
        self._deadline_s = settings.sidecar_deadline_s
        self._measures = measures
        self._heard_s = self._age_s = 0.0
        self._epoch = self._version = 0
        self._claims: list[int] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._suffix = predictor_pb2.PredictRequest(instance_id=instance.instance_id).SerializeToString()
        self._channel = grpc.aio.insecure_channel(instance.sidecar_address, options=CHANNEL)
        self._predict: Any = self._channel.unary_unary("/block.v1.Predictor/Predict")
        stub = predictor_pb2_grpc.PredictorStub(self._channel)
        self._reserve, self._release = stub.Reserve, stub.Release
        self._line = Line(self._channel, PREDICT_STREAM)

    @property
    def name(self) -> str:
        """The instance's id."""
        return self.instance.instance_id

    # Whether to ask.

    def is_open(self) -> bool:
        """Tell whether it may be asked, as far as is known."""
        return not self._circuit.is_open()

    def try_again(self) -> None:
        """Ask for signs of life, if it is time to, in the background: no decision waits for this."""
        if self._circuit.is_open() and self._circuit.allows(time.monotonic()):
            self.start(self._probe())

    async def _probe(self) -> None:
        try:
            raw = await asyncio.wait_for(self.ask(b""), self._deadline_s)
            response = self._checked(raw)
            self.take(response)
        except (TimeoutError, grpc.aio.AioRpcError, ConnectionError, ValueError) as error:
            self._circuit.failed(time.monotonic())
            self._line.hang_up()
            say(log, logging.DEBUG, "sidecar is still not well", instance=self.name, reason=note_of(error))

    def failed(self, fate: Fate) -> None:
        """Count a failure; one too many leaves it alone for a while, and those that failed with it do not count."""
        if fate is Fate.REFUSED:
            return
        self._measures.sidecar_failures.labels(self.name, fate.value).inc()
        if fate is Fate.DOWN and not self._line.works:
            self._line.works = None  # another may come in its place
        if self._circuit.is_open():
            return
        self._circuit.failed(time.monotonic())
        if self._circuit.is_open():
            self._line.hang_up()
            self._measures.circuits_open.inc()
            say(log, logging.WARNING, "sidecar left alone", instance=self.name, kind=fate.value)

    def _succeeded(self) -> None:
        if self._circuit.is_open():
            self._measures.circuits_open.dec()
            say(log, logging.INFO, "sidecar answers again", instance=self.name)
        self._circuit.succeeded()

    # Asking.

    def ask(self, question: bytes) -> asyncio.Future[bytes]:
        """Send a serialised PredictRequest that names nobody; messages are merged by putting them together."""
        question += self._suffix
        if self._line.works:
            return self._line.ask(question)
        return asyncio.ensure_future(self._ask(question))

    async def _ask(self, question: bytes) -> bytes:
        """Ask over the stream, if the sidecar knows how to; else by a call."""
        if self._line.works is None:
            try:
                return await self._line.ask(question)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
        answer: bytes = await self._predict(question, timeout=self._deadline_s)
        return answer

    def candidate(self, answer: asyncio.Future[bytes], request_id: str) -> Candidate:
        """Read what came of a question about one request."""
        if not answer.done():
            answer.add_done_callback(self._too_late)
            self.failed(Fate.LATE)
            return self.as_known(Fate.LATE, f"no answer within {self._deadline_s * 1e3:g} ms")
        try:
            response = self._checked(answer.result())
            forecast, refusal = prediction_in(response, request_id)
            self.take(response)
        except (grpc.aio.AioRpcError, ConnectionError, ValueError) as error:
            self.failed(fate_of(error))
            return self.as_known(fate_of(error), note_of(error))
        candidate = self.as_known(Fate.FORECAST)
        candidate.version, candidate.epoch, candidate.forecast = response.version, response.epoch, forecast
        if refusal:
            candidate.fate, candidate.note = Fate.REFUSED, refusal
        elif response.state in STATES:
            candidate.fate, candidate.note = STATES[response.state]
        return candidate

    def as_known(self, fate: Fate = Fate.UNASKED, note: str = "") -> Candidate:
        """Tell what is known of the instance without asking."""
        return Candidate(
            instance_id=self.instance.instance_id,
            fate=fate,
            note=note,
            indicators=self.indicators,
            age_s=self._age_s + (time.monotonic() - self._heard_s) if self.indicators else 0.0,
            unseen=self.unseen,
        )

    def _checked(self, raw: bytes) -> predictor_pb2.PredictResponse:
        try:
            response = predictor_pb2.PredictResponse.FromString(raw)
        except DecodeError:
            raise ValueError("its answer is garbage") from None
        if response.instance_id != self.name:
            raise ValueError(f"instance_id: {response.instance_id!r} answers there")
        return response

    def take(self, response: predictor_pb2.PredictResponse | Reserved | common_pb2.ReleaseResponse) -> None:
        """Keep what a reply tells of the instance; ValueError where it makes no sense."""
        if response.HasField("indicators"):
            self.indicators = indicators_from(response.indicators)
            self._age_s = response.indicators.age_s
            self._heard_s = time.monotonic()
            self.unseen = 0
        if not isinstance(response, common_pb2.ReleaseResponse):
            newer = response.epoch != self._epoch
            self._version = response.version if newer else max(self._version, response.version)
            self._epoch = response.epoch
        self._succeeded()

    def _too_late(self, answer: asyncio.Future[bytes]) -> None:
        """Take at least the indicators from an answer that nobody waits for any more."""
        if answer.cancelled() or answer.exception() is not None or self._circuit.is_open():
            return
        try:
            response = self._checked(answer.result())
            if response.HasField("indicators"):
                self.indicators = indicators_from(response.indicators)
                self._age_s, self._heard_s = response.indicators.age_s, time.monotonic()
        except ValueError as error:
            say(log, logging.DEBUG, "late and wrong", instance=self.name, reason=str(error))

    # Promises.

    def promised_since(self, version: int, epoch: int) -> int:
        """Count the promises made since a forecast: those heard of, and those of our own that are under way."""
        return max(0, self._head() - version) if epoch == self._epoch else 0

    def _head(self) -> int:
        return max(self._version, *self._claims) if self._claims else self._version

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> Reserved:
        """Promise a request to the instance; who decides meanwhile counts it already. SidecarError: it is not."""
        claim = (request.if_version if request.HasField("if_version") else self._head()) + 1
        self._claims.append(claim)
        try:
            response = await self._reserve(request, timeout=self._deadline_s)
            self._check_reserved(request, response)
            self.take(response)
        except asyncio.CancelledError:
            self.forget(request.request.request_id)
            raise
        except (grpc.aio.AioRpcError, ValueError) as error:
            fate = fate_of(error)
            self.failed(fate)
            if fate is not Fate.REFUSED:
                self.forget(request.request.request_id)  # it may have been promised all the same
            raise SidecarError(fate, note_of(error)) from None
        finally:
            self._claims.remove(claim)
        return response

    def _check_reserved(self, request: predictor_pb2.ReserveRequest, response: Reserved) -> None:
        if response.instance_id != self.name:
            raise ValueError(f"instance_id: {response.instance_id!r} answers there")
        if response.result == predictor_pb2.RESERVE_RESULT_UNSPECIFIED:
            raise ValueError("result: is missing")
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT and not request.HasField("if_version"):
            raise ValueError("result: a conflict, where there was no condition")
        if not 0 <= response.expires_in_s < 1e9:
            raise ValueError(f"expires_in_s: must be a time from 0 on, not {response.expires_in_s}")

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a promise, and tell what became of it; where nobody answers, there was none or it will expire."""
        try:
            response = await self._release(request, timeout=RELEASE_S)
            self.take(response)
        except (grpc.aio.AioRpcError, ValueError) as error:
            self.failed(fate_of(error))
            say(
                log,
                logging.DEBUG,
                "not released",
                request_id=request.request_id,
                instance=self.name,
                reason=note_of(error),
            )
            return common_pb2.ReleaseResponse()
        return response

    def forget(self, request_id: str) -> None:
        """Take back a promise that may have been made, in the background."""
        self.start(self.release(common_pb2.ReleaseRequest(request_id=request_id, instance_id=self.name)))

    # The end.

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Finish what is under way, and let the channel go."""
        if self._background:
            await asyncio.wait(self._background, timeout=RELEASE_S)
        await self._line.close()
        await self._channel.close()
        if self._circuit.is_open():
            self._measures.circuits_open.dec()


def prediction_in(response: predictor_pb2.PredictResponse, request_id: str) -> tuple[Forecast | None, str]:
    """Find the forecast for the one request that was asked about, or why it is refused."""
    if len(response.predictions) != 1:
        raise ValueError(f"predictions: there are {len(response.predictions)} for one request")
    prediction = response.predictions[0]
    if prediction.request_id != request_id:
        raise ValueError(f"predictions[0].request_id: {prediction.request_id!r} was not asked about")
    if prediction.HasField("refusal"):
        return None, f"{prediction.refusal.field}: {prediction.refusal.reason}"
    if not prediction.HasField("forecast"):
        raise ValueError("predictions[0].forecast: is missing")
    return forecast_from(prediction.forecast), ""


def fate_of(error: BaseException) -> Fate:
    """Tell what an error means for who sent it."""
    if isinstance(error, SidecarError):
        return error.fate
    if isinstance(error, grpc.aio.AioRpcError):
        return CODES.get(error.code(), Fate.DOWN)
    if isinstance(error, TimeoutError):
        return Fate.LATE
    return Fate.INVALID if isinstance(error, ValueError) else Fate.DOWN


def note_of(error: Exception) -> str:
    """Put an error into few words."""
    if isinstance(error, grpc.aio.AioRpcError):
        details = " ".join((error.details() or "").split()).removeprefix("requests[0].")[:200]
        return details if error.code() is grpc.StatusCode.INVALID_ARGUMENT else f"{error.code().name}: {details}"
    return str(error)[:200]


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
