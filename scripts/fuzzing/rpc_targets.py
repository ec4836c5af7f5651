"""Targets behind gRPC: every method of our services, bytes that are no HTTP/2, and what a proxy tells a picker."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from length_tagger import chained
from predictor.profile import load_profile
from protos.block.v1 import (
    common_pb2,
    predictor_pb2,
    predictor_pb2_grpc,
    provisioner_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tagger_pb2_grpc,
)
from protos.envoy.v3 import external_processor_pb2 as wire
from scripts.fuzzing.bodies import body_of, headers_of, path_of
from scripts.fuzzing.inputs import mutated
from scripts.fuzzing.messages import as_wire, message, packed, unpacked
from scripts.fuzzing.targets import require
from services.endpoint_picker.service import ExternalProcessorService
from services.instances.sources import Listed
from services.placement.settings import SchedulerSettings
from services.predictor_server.server import running_sidecars
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import SidecarSettings
from services.provisioner_server.hooks import DryRun
from services.provisioner_server.server import provisioning
from services.provisioner_server.settings import ProvisionerSettings
from services.rpc.channels import open_channel
from services.rpc.interceptor import CallInterceptor, Handler
from services.rpc.server import serving
from services.rpc.settings import ServerSettings
from services.scheduler_server import scheduling
from services.tagger_server.service import TaggerService
from tests.services.endpoint_picker.running import Picking, picking
from tests.services.gateway.stubs import Call, completes
from tests.services.predictor_server.running_sidecars import idle_engine
from tests.services.stub_sidecars import StubSidecar, sidecars

RAW = b"!frames"
REQUEST_MODES = (
    wire.BODY_SEND_MODE_BUFFERED, wire.BODY_SEND_MODE_FULL_DUPLEX_STREAMED, wire.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
    wire.BODY_SEND_MODE_NONE, wire.BODY_SEND_MODE_STREAMED, wire.BODY_SEND_MODE_BUFFERED_PARTIAL,
)  # fmt: skip
RESPONSE_MODES = REQUEST_MODES[:5]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ENDLESS_S = 0.01  # for methods that go on until the caller leaves
FINITE_S = 20.0
RAW_S = 0.05
NOT_DECLARED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
GOES_ON = ("Watch", "WatchDrains", "Tail", "History", "Report", "Generate")


@dataclass(kw_only=True)
class Context:
    """A call's context, without a connection."""

    left_s: float | None = None
    status: grpc.StatusCode | None = None
    details: str = ""
    num_written: int = 0
    check: Callable[[Any], object] = lambda _: None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End the call."""
        self.status, self.details = code, details
        require(all(value.isprintable() for _, value in trailing_metadata), "metadata that cannot be sent")
        raise grpc.aio.AbortError(details)

    async def write(self, response: Any) -> None:
        """Send a response."""
        self.check(response)
        self.num_written += 1

    def code(self) -> grpc.StatusCode | None:
        """Return the status."""
        return self.status

    def time_remaining(self) -> float | None:
        """Return the rest of the deadline."""
        return self.left_s

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return no certificate."""
        return {}

    def peer(self) -> str:
        """Return a caller on another machine, who may not change the policy."""
        return "ipv4:192.0.2.1:4711"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return no metadata."""
        return ()


@dataclass(kw_only=True)
class Methods:
    """Stands for a server while generated code registers: notes each method."""

    handlers: dict[str, Handler] = field(default_factory=dict)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Ignore handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Note the methods of a service."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def request_type(method: str) -> type[Message]:
    """Return the class of a method's requests."""
    _, service, name = method.split("/")
    descriptor = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    return message_factory.GetMessageClass(descriptor.input_type)


class GrpcTarget:
    """Calls each method behind the interceptor of our servers, and sends frames to a real port."""

    name = "grpc"

    def __init__(self, methods: Methods, port: int, predictor: PredictorService, stubs: list[StubSidecar]) -> None:
        """Guard all methods."""
        guard = CallInterceptor(64, CollectorRegistry(), ()).guard
        self._plain = methods.handlers
        self._handlers = {name: guard(name, handler) for name, handler in methods.handlers.items()}
        self._types = {name: request_type(name) for name in methods.handlers}
        self._finite = [name for name in self._types if not name.endswith(GOES_ON)]
        self._port = port
        self._predictor = predictor
        self._stubs = stubs

    async def drawn(self, draw: Random) -> bytes:
        """Draw a call, or frames."""
        if draw.random() < 0.005:
            return RAW + b"\n" + frames(draw)
        method = draw.choice(self._finite if draw.random() < 0.97 else list(self._types))
        kind = self._types[method]
        num = draw.randrange(1, 4) if self._plain[method].request_streaming else 1
        return method.encode() + b"\n" + packed([as_wire(draw, message(draw, kind)) for _ in range(num)])

    async def put(self, data: bytes) -> None:
        """Make a call."""
        name, _, rest = data.partition(b"\n")
        if name == RAW:
            await self._send_frames(rest)
            return
        method = name.decode("latin-1")
        handler = self._handlers.get(method)
        if handler is None:
            return
        write: Any = self._plain[method].response_serializer
        context = Context(check=write)
        raws = list(unpacked(rest))
        within_s = ENDLESS_S if method.endswith(GOES_ON) else FINITE_S
        task = asyncio.ensure_future(self._call(handler, raws, context, write))
        done, _ = await asyncio.wait([task], timeout=within_s)
        if not done:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            require(within_s == ENDLESS_S, f"{method} does not end")
        else:
            with suppress(grpc.aio.AbortError):
                task.result()
        require(context.status not in NOT_DECLARED, f"{method} ends with {context.status}")
        require(len(context.details) <= 500, f"{method} ends with a long message")

    async def _call(self, handler: Any, raws: list[bytes], context: Context, write: Callable[[Any], object]) -> None:
        async def each() -> AsyncIterator[bytes]:
            for raw in raws:
                yield raw

        first = raws[0] if raws else b""
        if handler.request_streaming and handler.response_streaming:
            await handler.stream_stream(each(), context)
        elif handler.request_streaming:
            write(await handler.stream_unary(each(), context))
        elif handler.response_streaming:
            await handler.unary_stream(first, context)
        else:
            write(await handler.unary_unary(first, context))

    async def _send_frames(self, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(RAW_S):
                while await reader.read(2**16):
                    pass
        writer.transport.abort()

    async def audit(self) -> None:
        """Release all reservations; a forecast and a decision are made over a real connection."""
        for endpoint in self._predictor._instances.values():  # noqa: SLF001 - what no client sees
            sidecar = endpoint._sidecar  # noqa: SLF001
            for one in [*sidecar.reservations._held]:  # noqa: SLF001
                sidecar.release(one)
            require(not len(sidecar.reservations), "reservations are left")
        channel = open_channel(f"127.0.0.1:{self._port}")
        try:
            request = common_pb2.Request(request_id="audit", prompt_tokens=20, max_tokens=9, ignore_eos=True, model="")
            predictor = predictor_pb2_grpc.PredictorStub(channel)
            reply = await predictor.Predict(predictor_pb2.PredictRequest(requests=[request]), timeout=10)
            require(reply.predictions[0].HasField("forecast"), "no forecast for a valid request")
            scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
            decision = (await scheduler.Schedule(scheduler_pb2.ScheduleRequest(request=request), timeout=10)).decision
            require(decision.instance.instance_id in ("a", "b"), "no decision for a valid request")
            for stub in self._stubs:
                for held in list(stub.held):
                    release = common_pb2.ReleaseRequest(request_id=held, instance_id=stub.name)
                    await scheduler.Release(release, timeout=10)
                require(not stub.held, "reservations of the scheduler are left")
        finally:
            await channel.close()


def frames(draw: Random) -> bytes:
    """Draw the beginning of an HTTP/2 connection: valid frames, invalid ones, or no frames at all."""
    if draw.random() < 0.15:
        return draw.randbytes(draw.randrange(1, 300))
    made = PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for _ in range(draw.randrange(1, 8)):
        payload = draw.randbytes(draw.choice((0, 1, 4, 6, 8, 9, 50, 500)))
        kind, flags, stream = draw.randrange(12), draw.randrange(256), draw.choice((0, 1, 2, 3, 5, 2**31 - 1))
        size = len(payload) if draw.random() < 0.9 else draw.choice((0, 2**14 + 1, 2**24 - 1))
        made += struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload
    return mutated(draw, made) if draw.random() < 0.2 else made


@asynccontextmanager
async def open_grpc(folder: Path) -> AsyncIterator[GrpcTarget]:
    """Run a scheduler, a sidecar, a tagger and a provisioner in this process."""
    idle_engine(folder / "one.state")
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars("a", "b"))
        registries = [CollectorRegistry() for _ in range(4)]
        scheduler = await stack.enter_async_context(
            scheduling(
                SchedulerSettings(sidecar_deadline_s=5.0, tagger_deadline_s=5.0, scheduler_id="s"),
                Listed([one.instance for one in stubs]),
                registries[0],
                poll_s=0.05,
            )
        )
        sidecar = SidecarSettings(instance_id="one", state_file=str(folder / "one.state"), stall_s=1e9)
        running = await stack.enter_async_context(
            running_sidecars([sidecar], load_profile("llama-2-7b-a30"), registries[1])
        )
        predictor = PredictorService(running)
        provisioner = await stack.enter_async_context(
            provisioning(
                ProvisionerSettings(folder=str(folder / "pool"), dry_run=True, provisioner_id="p"),
                DryRun(),
                registries[2],
            )
        )
        tagger = TaggerService(chained(["client", "history", "constant"]), registries[3])
        registers = [
            partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler),
            partial(predictor_pb2_grpc.add_PredictorServicer_to_server, predictor),
            partial(tagger_pb2_grpc.add_LengthTaggerServicer_to_server, tagger),
            partial(provisioner_pb2_grpc.add_ProvisionerServicer_to_server, provisioner),
        ]
        methods = Methods()
        for register in registers:
            register(methods)  # it stands for a server
        here = await stack.enter_async_context(serving(ServerSettings(drain_s=0.0), registers, CollectorRegistry()))
        yield GrpcTarget(methods, here.port, predictor, stubs)


# The endpoint picker.


class ExtProcTarget:
    """Shows a picker requests and responses as a proxy does, in right and wrong orders."""

    name = "ext_proc"

    def __init__(self, scene: Picking) -> None:
        """Serve streams by the picker of a running server."""
        self._scene = scene
        self._service = ExternalProcessorService(scene.running.picker, 64)

    async def drawn(self, draw: Random) -> bytes:
        """Draw the messages of one stream."""
        messages: list[Message] = [message(draw, wire.ProcessingRequest)] if draw.random() < 0.1 else exchange(draw)
        if draw.random() < 0.15:
            at = draw.randrange(len(messages) + 1)
            messages.insert(at, message(draw, wire.ProcessingRequest))
        if draw.random() < 0.1:
            draw.shuffle(messages)
        return packed([as_wire(draw, one) if draw.random() < 0.1 else one.SerializeToString() for one in messages])

    async def put(self, data: bytes) -> None:
        """Show the messages of a stream."""
        messages = []
        for raw in unpacked(data):
            with suppress(Exception):
                messages.append(wire.ProcessingRequest.FromString(raw))

        async def shown() -> AsyncIterator[wire.ProcessingRequest]:
            for one in messages:
                yield one

        context = Context()
        with suppress(grpc.aio.AbortError):
            async for response in self._service.Process(shown(), context):  # type: ignore[arg-type]
                response.SerializeToString()
                if response.HasField("immediate_response"):
                    status = response.immediate_response.status.code
                    require(status < 500 or status == 503, f"the client gets status {status}")
        require(context.status in (None, grpc.StatusCode.INVALID_ARGUMENT), f"ends with {context.status}")
        require(len(self._service) == 0, "a stream is left")
        if any(is_hidden(one) for one in messages):  # sidecars learn from the engine when such a request ends
            for stub in self._scene.sidecars:
                stub.held.clear()

    async def audit(self) -> None:
        """Check that nothing is under way or reserved, and have a valid request placed."""
        picker = self._scene.running.picker
        require(not picker._request_ids, "ids of requests are left")  # noqa: SLF001 - what no proxy sees
        for _ in range(200):
            if not any(one.held for one in self._scene.sidecars):
                break
            await asyncio.sleep(0.05)
        require(not any(one.held for one in self._scene.sidecars), "reservations are left")
        await self.put(packed([one.SerializeToString() for one in exchange(Random(1))]))


def is_hidden(shown: wire.ProcessingRequest) -> bool:
    """Return whether the picker does not see the response."""
    return shown.HasField("protocol_config") and shown.protocol_config.response_body_mode == wire.BODY_SEND_MODE_NONE


def header_map(pairs: Iterable[tuple[str, bytes]]) -> wire.HeaderMap:
    """Write headers as Envoy does."""
    return wire.HeaderMap(headers=[wire.HeaderValue(key=name, raw_value=value) for name, value in pairs])


def exchange(draw: Random) -> list[Message]:
    """Draw a request and its response as messages in their order."""
    chat = draw.random() < 0.5
    pairs = [
        (":method", draw.choice((b"POST", b"POST", b"GET"))),
        (":path", path_of(draw, chat=chat)),
        (":authority", b"x"),
    ]
    pairs += [(name.decode("latin-1"), value) for name, value in headers_of(draw)]
    has_body = draw.random() < 0.9
    config = wire.ProtocolConfiguration(
        request_body_mode=draw.choice(REQUEST_MODES), response_body_mode=draw.choice(RESPONSE_MODES)
    )
    head = wire.HttpHeaders(headers=header_map(pairs), end_of_stream=not has_body)
    made: list[Message] = [wire.ProcessingRequest(request_headers=head, protocol_config=config)]
    if has_body:
        pieces = cut(draw, body_of(draw, chat=chat))
        for place, piece in enumerate(pieces, 1):
            made.append(
                wire.ProcessingRequest(request_body=wire.HttpBody(body=piece, end_of_stream=place == len(pieces)))
            )
    status = draw.choice((b"200", b"200", b"200", b"500", b"abc", b"", b"9" * 5000, b"\xff"))
    kind = draw.choice((b"application/json", b"text/event-stream"))
    replied = wire.HttpHeaders(headers=header_map(((":status", status), ("content-type", kind))))
    made.append(wire.ProcessingRequest(response_headers=replied))
    events = cut(draw, reply_of(draw))
    made += [wire.ProcessingRequest(response_body=wire.HttpBody(body=piece)) for piece in events]
    made.append(wire.ProcessingRequest(response_body=wire.HttpBody(end_of_stream=True)))
    return made


def cut(draw: Random, data: bytes) -> list[bytes]:
    """Cut bytes into pieces at any places."""
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip((0, *places), (*places, len(data)), strict=True)]


def reply_of(draw: Random) -> bytes:
    """Draw an engine's events."""
    event = b'data: {"id":"a","model":"tiny","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
    end = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    data = event * draw.randrange(4) + end
    return mutated(draw, data) if draw.random() < 0.5 else data


async def replies(call: Call) -> None:
    """Reply as an engine does; nothing of the call is kept."""
    await completes(call)


@asynccontextmanager
async def open_ext_proc(_: Path) -> AsyncIterator[ExtProcTarget]:
    """Run a picker over two stub sidecars."""
    async with picking(replies, replies) as scene:
        yield ExtProcTarget(scene)
