"""The connection to the sidecars behind one address: one channel, one stream for each kind of call, for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate import CandidateStatus
from services.instances.instance import REMOVED_FROM_LIST
from services.placement.circuit_breaker import CircuitBreaker
from services.placement.metrics import SchedulerMetrics
from services.placement.pipelined_call import PREDICTOR, PipelinedCall
from services.placement.replies import (
    FAILURES,
    predict_responses,
    release_response,
    reserve_response,
    status_of,
    watch_response,
)
from services.placement.settings import SchedulerSettings
from services.rpc.grpc_channel import GrpcChannel
from services.security.own_key import own_key

UNREACHABLE = (CandidateStatus.LATE, CandidateStatus.DOWN)  # states that all sidecars behind one address share
RELEASE_S = 5.0  # deadline of calls that no request waits for


class ForecastCall:
    """A call that asks several instances behind one address for forecasts; each reads its part of the reply."""

    def __init__(self, names: Sequence[str], reply: asyncio.Future[bytes], deadline_s: float) -> None:
        """Wait for the reply."""
        self.reply = reply
        self.names = names
        self._deadline_s = deadline_s
        self._responses: Mapping[str, predictor_pb2.PredictResponse] | None = None

    def response_of(self, name: str) -> predictor_pb2.PredictResponse:
        """Return an instance's part of the reply; without one, raise what went wrong: one of FAILURES."""
        if self._responses is None:
            self._responses = predict_responses(self._raw(), self.names)
        if name not in self._responses:
            raise ValueError(f"instance_id: {', '.join(map(repr, self._responses)) or 'no instance'} answers there")
        return self._responses[name]

    def _raw(self) -> bytes:
        if not self.reply.done():
            raise TimeoutError(f"no reply within {self._deadline_s * 1e3:g} ms")
        return self.reply.result()

    def failure(self) -> CandidateStatus | None:
        """Return what went wrong with the call as a whole, if anything did."""
        try:
            self._raw()
        except FAILURES as error:
            return status_of(error)
        return None


class SidecarConnection:
    """A channel to one address, and its circuit breaker. Calls in flight end before it is closed."""

    def __init__(
        self, address: str, settings: SchedulerSettings, metrics: SchedulerMetrics, suspects: set[str]
    ) -> None:
        """Make the channel, which connects by itself; instances that cannot be reached become suspects."""
        self.names: Collection[str] = ()  # of the instances whose sidecars answer here
        self.breaker = CircuitBreaker(address, settings.circuit(), metrics)
        self._suspects = suspects
        self._deadline_s = settings.sidecar_deadline_s
        self._channel = GrpcChannel(address, key=own_key(settings.part_key_file))
        self._predict = PipelinedCall(self._channel, "Predict", self._deadline_s)
        self._reserve = PipelinedCall(self._channel, "Reserve", self._deadline_s)
        self._release = PipelinedCall(self._channel, "Release", RELEASE_S)
        self._asked: tuple[Sequence[str], bytes] = ((), b"")
        self._is_removed = False

    def ask(self, request: bytes, names: Sequence[str]) -> ForecastCall:
        """Send a serialised PredictRequest that names no instance; concatenated messages are merged by protobuf."""
        if names != self._asked[0]:
            if len(names) == 1:
                target = predictor_pb2.PredictRequest(instance_id=names[0])
            else:
                target = predictor_pb2.PredictRequest(instance_ids=names)
            self._asked = (names, target.SerializeToString())
        return ForecastCall(names, self._predict.send(request + self._asked[1]), self._deadline_s)

    def note(self, call: ForecastCall) -> None:
        """Count whether a call was answered in time."""
        failure = call.failure()
        if failure is None:
            self.breaker.succeeded()
        else:
            self.note_failure(failure)

    def note_failure(self, status: CandidateStatus) -> None:
        """Count a failed call; one too many opens the circuit and ends the streams."""
        if status in UNREACHABLE:
            self._suspects.update(self.names)
            if self.breaker.failed(status.value):
                self._predict.cancel()
                self._reserve.cancel()
                self._release.cancel()

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Have an instance reserve a request."""
        reply = self._reserve.send(request.SerializeToString())
        await asyncio.wait([reply], timeout=self._deadline_s)
        if not reply.done():
            raise TimeoutError(f"no reply within {self._deadline_s * 1e3:g} ms")
        return reserve_response(reply.result())

    def stop_reserving(self) -> None:
        """Refuse reservations from now on."""
        self._reserve.stop()

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """End a reservation."""
        if self._is_removed:
            raise ConnectionError(REMOVED_FROM_LIST)
        reply = self._release.send(request.SerializeToString())
        await asyncio.wait([reply], timeout=RELEASE_S)
        if not reply.done():
            raise TimeoutError(f"no reply within {RELEASE_S:g} s")
        return release_response(reply.result())

    async def watch(
        self, request: predictor_pb2.WatchRequest, on_report: Callable[[predictor_pb2.WatchResponse], None]
    ) -> None:
        """Pass on what an instance reports by itself, until the call ends; raise its error, or that of `on_report`."""
        if self._is_removed:
            raise ConnectionError(REMOVED_FROM_LIST)
        await self._channel.follow(
            f"/{PREDICTOR}/Watch", request.SerializeToString(), lambda raw: on_report(watch_response(raw))
        )

    async def close(self) -> None:
        """Accept no more calls, finish those in flight, and close the channel."""
        self._is_removed = True
        await asyncio.gather(self._predict.close(), self._reserve.close(), self._release.close())
        await self._channel.close()
        self.breaker.close()
