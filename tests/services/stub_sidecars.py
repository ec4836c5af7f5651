"""Stub sidecars whose replies a test controls, served over gRPC on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.block.v1 import common_pb2, predictor_pb2
from services.instances.instance import Instance
from services.rpc.messages import indicators_from, indicators_message
from tests.services.waiting import bound

SERVICE = "block.v1.Predictor"

READY, DOWN = common_pb2.INSTANCE_STATE_READY, common_pb2.INSTANCE_STATE_DOWN
RESERVED = predictor_pb2.RESERVE_RESULT_RESERVED
EXTENDED = predictor_pb2.RESERVE_RESULT_EXTENDED
CONFLICT = predictor_pb2.RESERVE_RESULT_CONFLICT
REFUSED = predictor_pb2.RESERVE_RESULT_REFUSED


@dataclass(slots=True, kw_only=True)
class StubSidecar:
    """Forecasts a latency that grows with each reservation, and counts reservations as a real sidecar does.

    `twist` changes or replaces a reply before it is sent; while `hung` is given, no reply is sent until it is set.
    """

    name: str
    engine_url: str = "http://127.0.0.1:1"
    ttft_s: float = 0.1
    e2e_s: float = 2.0
    per_reservation_s: float = 0.1
    state: common_pb2.InstanceState.ValueType = READY
    streams: bool = True
    always_conflicts: bool = False  # with another reservation, whenever a version is given
    models: tuple[str, ...] = ()
    role: str = "both"
    rank: int | None = None
    hung: asyncio.Event | None = None
    hung_reserving: asyncio.Event | None = None
    hung_after_reserving: asyncio.Event | None = None  # after the reservation, before the reply
    twist: Callable[[predictor_pb2.PredictResponse], Any] | None = None
    refuse: grpc.StatusCode | None = None
    held: dict[str, predictor_pb2.ReserveRequest] = field(default_factory=dict)
    reserved_ids: list[str] = field(default_factory=list)  # of all reservations so far
    outcomes: list[common_pb2.Outcome] = field(default_factory=list)
    questions: list[predictor_pb2.PredictRequest] = field(default_factory=list)
    refuse_prompts_of: int = -1  # prompts of this number of tokens
    refuse_reservations: bool = False
    num_streams: int = 0
    num_streamed: int = 0  # requests over streams
    open_streams: set[asyncio.Event] = field(default_factory=set)
    load: dict[str, float] = field(default_factory=lambda: {"num_running": 1, "num_waiting": 0})
    watchers: set[asyncio.Event] = field(default_factory=set)
    reports_changes: bool = False  # since the last report, as sidecars do; otherwise everything each time
    num_watched: int = 0  # calls of Watch so far
    num_reserving: int = 0  # calls of Reserve so far
    num_conflicts: int = 0
    version: int = 0
    epoch: int = 7
    port: int = 0
    server: Any = None

    @property
    def instance(self) -> Instance:
        """The entry in a list of instances."""
        return Instance(
            instance_id=self.name,
            engine_url=self.engine_url,
            sidecar_address=f"127.0.0.1:{self.port}",
            models=self.models,
            role=self.role,
            data_parallel_rank=self.rank,
        )

    async def start(self) -> None:
        """Serve: on any free port at first, on the same port afterwards."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods = {
            "Predict": grpc.unary_unary_rpc_method_handler(self.predict),
            "Reserve": grpc.unary_unary_rpc_method_handler(self.reserve),
            "Release": grpc.unary_unary_rpc_method_handler(self.release),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }
        if self.streams:
            methods["PredictStream"] = grpc.stream_stream_rpc_method_handler(self.predict_stream)
            methods["ReserveStream"] = grpc.stream_stream_rpc_method_handler(self.reserve_stream)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self.port = await bound(lambda: self.server.add_insecure_port(f"127.0.0.1:{self.port}"))
        await self.server.start()

    async def stop(self) -> None:
        """Stop serving at once."""
        await self.server.stop(None)
        self.server = None  # it has to be collected while the event loop runs

    async def crash(self) -> None:
        """Stop serving and lose all state."""
        await self.stop()
        self.held.clear()
        self.version, self.epoch = 0, self.epoch + 1

    async def predict(self, raw: bytes, context: Any) -> bytes:
        """Reply to a Predict request."""
        request = predictor_pb2.PredictRequest.FromString(raw)
        self.questions.append(request)
        if self.hung is not None:
            await self.hung.wait()
        if self.refuse is not None:
            await context.abort(self.refuse, "by the test")
        if any(one.prompt_tokens == self.refuse_prompts_of for one in request.requests):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "requests[0].prompt_tokens: by the test")
        if request.instance_id != self.name:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is {self.name}")
        response = predictor_pb2.PredictResponse(
            instance_id=self.name,
            predictions=[self.prediction(one) for one in request.requests if self.state != DOWN],
            indicators=self.indicators() if self.state != DOWN else None,
            version=self.version,
            epoch=self.epoch,
            state=self.state,
        )
        twisted = response if self.twist is None else self.twist(response)
        return twisted if isinstance(twisted, bytes) else (twisted or response).SerializeToString()

    async def predict_stream(self, raws: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Reply to Predict requests, one after the other."""
        self.num_streams += 1
        async for raw in self._until_ended(raws):
            self.num_streamed += 1
            yield await self.predict(raw, context)

    async def reserve_stream(self, raws: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Reply to Reserve requests, one after the other."""
        async for raw in self._until_ended(raws):
            yield await self.reserve(raw, context)

    async def _until_ended(self, raws: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        ended = asyncio.Event()
        self.open_streams.add(ended)
        try:
            messages = aiter(raws)
            while (raw := await _unless(ended, anext(messages, None))) is not None:
                yield raw
        finally:
            self.open_streams.discard(ended)

    def end_streams(self) -> None:
        """End all streams, as a server may do."""
        for ended in self.open_streams:
            ended.set()

    def prediction(self, request: common_pb2.Request) -> predictor_pb2.Prediction:
        """Return a forecast that counts all reservations."""
        wait_s = self.per_reservation_s * len(self.held)
        forecast = common_pb2.Forecast(
            request_id=request.request_id,
            queue_s=wait_s,
            ttft_s=wait_s + self.ttft_s,
            e2e_s=wait_s + self.e2e_s,
            tpot_s=0.01,
            output_tokens=100,
        )
        return predictor_pb2.Prediction(request_id=request.request_id, forecast=forecast)

    def indicators(self) -> common_pb2.Indicators:
        """Return the current indicators."""
        return indicators_message({**self.load, "num_reserved": len(self.held)}, age_s=0.01)

    async def watch(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """Send the state, and again after every `update_load`."""
        self.num_watched += 1
        sent: dict[str, float] = {}
        changed = asyncio.Event()
        self.watchers.add(changed)
        try:
            while True:
                message = self.indicators()
                values = indicators_from(message)
                is_full = not self.reports_changes or bool(sent.keys() - values.keys()) or not sent
                if not is_full:
                    changes = {name: value for name, value in values.items() if sent.get(name) != value}
                    message = indicators_message(changes, age_s=0.01)
                yield predictor_pb2.WatchResponse(
                    instance_id=self.name,
                    full=is_full,
                    indicators=message if self.state != DOWN else None,
                    version=self.version,
                    epoch=self.epoch,
                    state=self.state,
                ).SerializeToString()
                sent = dict(values)
                await changed.wait()
                changed.clear()
        finally:
            self.watchers.discard(changed)

    def update_load(self, **load: float) -> None:
        """Change indicators, and send them to all watchers."""
        self.load.update(load)
        for changed in self.watchers:
            changed.set()

    async def reserve(self, raw: bytes, context: Any) -> bytes:
        """Reserve a request, unless its version is out of date."""
        request = predictor_pb2.ReserveRequest.FromString(raw)
        self.num_reserving += 1
        if self.hung_reserving is not None:
            await self.hung_reserving.wait()
        if self.refuse is not None:
            await context.abort(self.refuse, "by the test")
        expires_in_s = request.request.in_s + request.ttl_s
        response = predictor_pb2.ReserveResponse(instance_id=self.name, epoch=self.epoch, expires_in_s=expires_in_s)
        name = request.request.request_id
        self.version += self.always_conflicts
        stale = (request.if_version, request.if_epoch) != (self.version, self.epoch)
        if self.refuse_reservations:
            response.result = REFUSED
            response.prediction.refusal.field, response.prediction.refusal.reason = "prompt_tokens", "by the test"
        elif name in self.held:
            response.result = EXTENDED
        elif request.HasField("if_version") and stale:
            response.result = CONFLICT
            response.prediction.CopyFrom(self.prediction(request.request))
            self.num_conflicts += 1
        else:
            response.result = RESERVED
            self.held[name] = request
            self.reserved_ids.append(name)
            self.version += 1
        if self.hung_after_reserving is not None:
            await self.hung_after_reserving.wait()
        response.version = self.version
        response.indicators.CopyFrom(self.indicators())
        return response.SerializeToString()

    async def release(self, raw: bytes, context: Any) -> bytes:
        """Release a reservation."""
        request = common_pb2.ReleaseRequest.FromString(raw)
        released = self.held.pop(request.request_id, None) is not None
        if request.HasField("outcome"):
            self.outcomes.append(request.outcome)
        return common_pb2.ReleaseResponse(released=released, indicators=self.indicators()).SerializeToString()


async def _unless(ended: asyncio.Event, message: Any) -> Any:
    """Wait for a message; None if the stream is to end before one comes."""
    received, ending = asyncio.ensure_future(message), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait([received, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:  # also of a stream that its client leaves: a task that is collected while it waits would be logged
        for task in (received, ending):
            task.cancel()
    return received.result() if received.done() and not received.cancelled() else None


@asynccontextmanager
async def sidecars(*names: str, **options: Any) -> AsyncIterator[list[StubSidecar]]:
    """Serve stub sidecars, each on its own port."""
    stubs = [StubSidecar(name=name, **options) for name in names]
    for stub in stubs:
        await stub.start()
    try:
        yield stubs
    finally:
        for stub in stubs:
            if stub.server is not None:
                await stub.stop()
