"""Engines and schedulers on real sockets, whose behaviour a test sets, and a gateway between them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.rpc.server import ServerSettings
from services.security.access_settings import AccessSettings
from tests.ports import free_port
from tests.services.security.key_files import key_file
from tests.services.waiting import LIMIT_S, PATIENCE_S, bound

LOCAL = "127.0.0.1"


# Engines.


@dataclass(kw_only=True)
class Call:
    """One request that an engine received, and its reply."""

    target: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def head(self, status: int, content_type: str, *headers: str) -> None:
        """Send status and headers."""
        lines = [f"HTTP/1.1 {status} Some", f"content-type: {content_type}", *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode())

    def stream(self) -> None:
        """Start a stream."""
        self.head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked", "x-engine: yes")

    async def chunk(self, data: bytes) -> None:
        """Send a piece of the stream as one chunk."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    def end(self) -> None:
        """End the stream."""
        self.writer.write(b"0\r\n\r\n")

    def whole(self, data: object, status: int = 200, *headers: str) -> None:
        """Reply in one piece."""
        text = json.dumps(data).encode()
        self.head(status, "application/json", f"content-length: {len(text)}", *headers)
        self.writer.write(text)

    def die(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()

    async def left(self) -> None:
        """Wait until the other side has disconnected."""
        with suppress(ConnectionError):
            assert await self.reader.read(1) == b""


Answer = Callable[[Call], Awaitable[None]]


def event(text: str, reason: str | None = None) -> bytes:
    """Write a completion's event as vLLM does."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM = (event("Hello"), event(" wörld"), event("!", "length"), DONE)


async def streams(call: Call) -> None:
    """Reply with three tokens, each in its own chunk."""
    call.stream()
    for piece in STREAM:
        await call.chunk(piece)
    call.end()


COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "text": "Hello world!", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


async def completes(call: Call) -> None:
    """Reply in one piece."""
    call.whole(COMPLETION)


async def hangs(call: Call) -> None:
    """Never reply."""
    await call.left()


@dataclass(kw_only=True)
class Engine:
    """An HTTP server that replies to all requests in the same way."""

    answer: Answer
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://{LOCAL}:{self.port}"

    async def start(self) -> None:
        """Listen; after a stop, at the same port."""
        self._server = await bound(lambda: asyncio.start_server(self._serve, LOCAL, self.port))
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: close the socket and abort all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                request, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                if headers.get("transfer-encoding") == "chunked":  # a proxy that streams the body
                    body = await _chunked(reader)
                else:
                    body = await reader.readexactly(int(headers.get("content-length", 0)))
                call = Call(target=request.split()[1], headers=headers, body=body, reader=reader, writer=writer)
                self.calls.append(call)
                await self.answer(call)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readline()
    return b"".join(pieces)


@asynccontextmanager
async def engines(*answers: Answer) -> AsyncIterator[list[Engine]]:
    """Run an engine for each answer."""
    running = [Engine(answer=answer) for answer in answers]
    for engine in running:
        await engine.start()
    try:
        yield running
    finally:
        for engine in running:
            await engine.stop()


def unreachable() -> str:
    """Return a URL at which no server listens."""
    return f"http://{LOCAL}:{free_port()}"


# Schedulers.


class Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Sends every request to the first of its instances that is not excluded, and records all calls.

    Where an instance has the role `prefill`, prefill and decode go to the first ones of each role, unless the request
    asks for one of the legs or for none; without such an instance it is served whole.
    """

    def __init__(self, urls: list[str], **instance: Any) -> None:
        """Set the engines' URLs; their ids are e0, e1 and so on."""
        self.instances = [
            common_pb2.Instance(instance_id=f"e{number}", engine_url=url, **{"models": ["tiny"], **instance})
            for number, url in enumerate(urls)
        ]
        self.asked: list[scheduler_pb2.ScheduleRequest] = []
        self.events: list[str] = []  # of decisions and releases, in their order
        self.seen: asyncio.Queue[scheduler_pb2.ScheduleRequest] = asyncio.Queue()
        self.released: asyncio.Queue[common_pb2.ReleaseRequest] = asyncio.Queue()
        self.drains_changed = asyncio.Condition()
        self.open = asyncio.Event()  # while it is cleared, no decision is made
        self.open.set()
        self.divides_always = False  # whatever a request asks for
        self.has_decode_legs = True  # places decode legs by themselves
        self.refusal: tuple[Any, ...] | None = None  # code, details and, perhaps, trailing metadata
        self.changes = common_pb2.Decision()  # fields of each decision
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        """Its URL."""
        return f"{LOCAL}:{self.port}"

    async def start(self) -> None:
        """Listen; after a stop, at the same port."""
        self._server = server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)
        self.port = await bound(lambda: server.add_insecure_port(f"{LOCAL}:{self.port}"))
        await server.start()

    async def stop(self) -> None:
        """Die."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide."""
        self.asked.append(request)
        self.events.append("asked")
        self.seen.put_nowait(request)
        await self.open.wait()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        excluded = set(request.exclude_instance_ids)
        both = [instance for instance in self.instances if instance.instance_id not in excluded]
        left = [instance for instance in both if instance.role != "prefill"]
        pool = [instance for instance in both if instance.role == "prefill"]
        leg = request.request.leg
        is_divided = bool(pool) and (leg == common_pb2.LEG_UNSPECIFIED or self.divides_always)
        if not left or (leg == common_pb2.LEG_DECODE and not self.has_decode_legs):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no instance is left")
        decision = common_pb2.Decision(
            request_id=request.request.request_id,
            instance=left[0],
            policy="first",
            forecast=common_pb2.Forecast(ttft_s=0.125, e2e_s=2.5, output_tokens=3),
            tag=common_pb2.Tag(median_tokens=3, estimator="constant", keys=[1, 2]),
            next_best=left[1:],
            why="it is the first",
            prefill=common_pb2.PlacedLeg(leg=common_pb2.LEG_PREFILL, instance=pool[0]) if is_divided else None,
            disaggregation="pair" if is_divided else "",
            candidates=[common_pb2.Candidate(instance_id=one.instance_id) for one in left] if request.explain else [],
        )
        decision.MergeFrom(self.changes)
        return scheduler_pb2.ScheduleResponse(decision=decision)

    async def ListInstances(
        self, request: scheduler_pb2.ListInstancesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ListInstancesResponse:
        """Return all instances."""
        return scheduler_pb2.ListInstancesResponse(instances=self.instances)

    async def Release(
        self,
        request: common_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> common_pb2.ReleaseResponse:
        """Record a release."""
        self.events.append(f"released {request.instance_id}")
        self.released.put_nowait(request)
        return common_pb2.ReleaseResponse(released=True)

    async def WatchDrains(
        self, request: scheduler_pb2.WatchDrainsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[scheduler_pb2.WatchDrainsResponse]:
        """Stream the instances that drain."""
        while True:
            draining = [one for one in self.instances if one.state == common_pb2.INSTANCE_STATE_DRAINING]
            yield scheduler_pb2.WatchDrainsResponse(instances=draining, now_unix_s=time.time())
            async with self.drains_changed:
                await self.drains_changed.wait()

    async def drain(self, instance_id: str, **drain: Any) -> None:
        """Have an instance drain, by default at once; it is still chosen, as by a scheduler that does not know it."""
        for one in self.instances:
            if one.instance_id == instance_id:
                one.state = common_pb2.INSTANCE_STATE_DRAINING
                one.drain.CopyFrom(common_pb2.Drain(**{"deadline_unix_s": time.time(), **drain}))
        async with self.drains_changed:
            self.drains_changed.notify_all()

    async def undrain(self, instance_id: str) -> None:
        """Have an instance take requests again."""
        for one in self.instances:
            if one.instance_id == instance_id:
                one.state = common_pb2.INSTANCE_STATE_READY
        async with self.drains_changed:
            self.drains_changed.notify_all()

    def Generate(self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Do nothing: gateways do not stream through schedulers."""
        raise NotImplementedError


# Everything together.


@dataclass(kw_only=True)
class Scene:
    """A gateway, its schedulers and engines, and a client."""

    client: httpx.AsyncClient
    engines: list[Engine]
    schedulers: list[Scheduler]
    port: int

    @property
    def scheduler(self) -> Scheduler:
        """The first scheduler."""
        return self.schedulers[0]

    async def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Request a completion."""
        headers = fields.pop("headers", None)
        return await self.client.post(path, json={"model": "tiny", "prompt": "Say hello", **fields}, headers=headers)

    async def metric(self, line: str) -> float:
        """Read a metric."""
        text = (await self.client.get("/metrics")).text
        return sum(float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line))


@asynccontextmanager
async def scene(
    *answers: Answer,
    urls: list[str] | None = None,
    num_schedulers: int = 1,
    keys: tuple[str, ...] = (),
    server: dict[str, Any] | None = None,
    instance: dict[str, Any] | None = None,
    tracer: Any = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    """Start everything; `urls` come before those of the engines, and `keys` are tables of a key file."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(engines(*answers))
        known = [*(urls or []), *(engine.url for engine in running)]
        schedulers = [Scheduler(known, **(instance or {})) for _ in range(num_schedulers)]
        for scheduler in schedulers:
            await scheduler.start()
            stack.push_async_callback(scheduler.stop)
        addresses = tuple(one.address for one in schedulers)
        settings = GatewaySettings(
            **{"schedulers": addresses, "schedule_s": PATIENCE_S, "connect_s": PATIENCE_S, **options}
        )
        access = AccessSettings(api_key_file=stack.enter_context(key_file(*keys)))
        here = await stack.enter_async_context(
            serving(settings, ServerSettings(**{"drain_s": 1.0, "access": access, **(server or {})}), tracer=tracer)
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        )
        yield Scene(client=client, engines=running, schedulers=schedulers, port=here.port)
