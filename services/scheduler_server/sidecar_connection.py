"""The way to the sidecars of one node: one channel, one stream of questions and one of promises, for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager

import grpc

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from scheduler.candidate_ranking import CandidateStatus
from services.placement.settings import SchedulerSettings
from services.scheduler_server.circuit_breaker import CircuitBreaker
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.pipelined_call import PipelinedCall
from services.scheduler_server.replies import FAILURES, fate_of, promise_in, responses_in

UNREACHED = (CandidateStatus.LATE, CandidateStatus.DOWN)  # fates that all who answer at one place share
RELEASE_S = 5.0  # deadline of what nobody waits for

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


class ForecastCall:
    """A question to several instances of a node; what each of them says is read once the answer is there."""

    def __init__(self, names: Sequence[str], answer: asyncio.Future[bytes], deadline_s: float) -> None:
        """Wait for the answer."""
        self.answer = answer
        self._names = names
        self._deadline_s = deadline_s
        self._responses: dict[str, predictor_pb2.PredictResponse] | None = None

    def response_of(self, name: str) -> predictor_pb2.PredictResponse:
        """Give an instance's answer; where there is none, raise what went wrong instead: one of FAILURES."""
        if self._responses is None:
            self._responses = responses_in(self._raw(), self._names)
        if name not in self._responses:
            raise ValueError(f"instance_id: {', '.join(map(repr, self._responses)) or 'nobody'} answers there")
        return self._responses[name]

    def _raw(self) -> bytes:
        if not self.answer.done():
            raise TimeoutError(f"no answer within {self._deadline_s * 1e3:g} ms")
        return self.answer.result()

    def fate(self) -> CandidateStatus | None:
        """Tell what went wrong on the way, if anything did."""
        try:
            self._raw()
        except FAILURES as error:
            return fate_of(error)
        return None


class SidecarConnection:
    """Where one or several sidecars answer. Calls that are under way end before it is let go."""

    def __init__(
        self, address: str, settings: SchedulerSettings, measures: SchedulerMetrics, troubled: set[str]
    ) -> None:
        """Make the channel; it connects by itself. Who can be reached no more becomes one of the troubled."""
        self.names: Collection[str] = ()  # of the instances whose sidecars answer here
        self.troubled = troubled
        self.trust = CircuitBreaker(address, settings.circuit(), measures)
        self._deadline_s = settings.sidecar_deadline_s
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL)
        stub = predictor_pb2_grpc.PredictorStub(self._channel)
        self._release, self._watch = stub.Release, stub.Watch
        self._asking = PipelinedCall(self._channel, "Predict", self._deadline_s)
        self._reserving = PipelinedCall(self._channel, "Reserve", self._deadline_s)
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._has_gone = False

    def ask(self, question: bytes, names: Sequence[str]) -> ForecastCall:
        """Send a serialised PredictRequest that names nobody; messages are merged by putting them together."""
        if len(names) == 1:
            whom = predictor_pb2.PredictRequest(instance_id=names[0])
        else:
            whom = predictor_pb2.PredictRequest(instance_ids=names)
        return ForecastCall(names, self._asking.ask(question + whom.SerializeToString()), self._deadline_s)

    def note(self, asked: ForecastCall) -> None:
        """Note whether a question was answered in time."""
        fate = asked.fate()
        if fate is None:
            self.trust.succeeded()
        else:
            self.note_fate(fate)

    def note_fate(self, fate: CandidateStatus) -> None:
        """Note what became of a call that failed; after one too many nobody here is asked for a while."""
        if fate in UNREACHED:
            self.troubled.update(self.names)
            if self.trust.failed(fate.value):
                self._asking.hang_up()
                self._reserving.hang_up()

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Ask for a promise."""
        answer = self._reserving.ask(request.SerializeToString())
        await asyncio.wait([answer], timeout=self._deadline_s)
        if not answer.done():
            raise TimeoutError(f"no answer within {self._deadline_s * 1e3:g} ms")
        return promise_in(answer.result())

    def promises_no_more(self) -> None:
        """Refuse to ask for promises from now on."""
        self._reserving.refuse()

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a promise."""
        with self._calling():
            response: common_pb2.ReleaseResponse = await self._release(request, timeout=RELEASE_S)
        return response

    async def watch(self, request: predictor_pb2.WatchRequest) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Listen to what an instance tells of itself."""
        if self._has_gone:
            raise ConnectionError("has left the list")
        async for message in self._watch(request):
            yield message

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Keep the channel open: one that is closed cancels whoever waits for a call on it."""
        if self._has_gone:
            raise ConnectionError("has left the list")
        self._num_calls += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._is_idle.set()

    async def close(self) -> None:
        """Take nothing new, finish what is under way, and let the channel go."""
        self._has_gone = True
        await asyncio.gather(self._asking.close(), self._reserving.close())
        await self._is_idle.wait()  # every call has a deadline
        await self._channel.close()
        self.trust.forget()
