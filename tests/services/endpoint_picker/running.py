"""A picker over stub sidecars and stub engines, and a proxy's side of its protocol."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.envoy.v3 import external_processor_pb2 as wire
from protos.envoy.v3 import external_processor_pb2_grpc
from services.endpoint_picker.server import RunningPicker, serving
from services.endpoint_picker.settings import PickerSettings
from services.instances.sources import Listed
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from tests.services.gateway.stubs import LOCAL, Answer, Engine, engines
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import PATIENCE_S

MODEL = "tiny"
ENDPOINT = "x-gateway-destination-endpoint"
FULL_DUPLEX = wire.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
BUFFERED, STREAMED, NONE = wire.BODY_SEND_MODE_BUFFERED, wire.BODY_SEND_MODE_STREAMED, wire.BODY_SEND_MODE_NONE


@dataclass(kw_only=True)
class Picking:
    """A running picker, the sidecars and engines behind it, and streams to it."""

    running: RunningPicker
    sidecars: list[StubSidecar]
    engines: list[Engine]
    stub: Any

    @property
    def endpoints(self) -> list[str]:
        """The engines as a proxy names them."""
        return [f"{LOCAL}:{engine.port}" for engine in self.engines]

    def metric(self, name: str, **labels: str) -> float:
        """Read a metric."""
        return self.running.picker.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def picking(
    *answers: Answer,
    roles: tuple[str, ...] = (),
    ranks: bool = False,
    settings: Mapping[str, Any] | None = None,
    tracer: Any = None,
    **scheduler: Any,
) -> AsyncIterator[Picking]:
    """Run a picker over an instance for each answer of an engine; instances are called a, b and so on.

    With `ranks` they are data-parallel ranks of the first engine.
    """
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars(*"abcdefgh"[: len(answers)]))
        behind = await stack.enter_async_context(engines(*answers))
        for number, (stub, engine) in enumerate(zip(stubs, behind, strict=True)):
            stub.engine_url, stub.models = engine.url, (MODEL,)
            stub.role = roles[number] if roles else "both"
            stub.rank = number if ranks else None
            if ranks:
                stub.engine_url = behind[0].url
        running = await stack.enter_async_context(
            serving(
                PickerSettings(**{"secure_serving": False, "schedule_s": 2 * PATIENCE_S, **(settings or {})}),
                ServerSettings(drain_s=0.0),
                SchedulerSettings(**{"scheduler_id": "own", "sidecar_deadline_s": PATIENCE_S, **scheduler}),
                Listed([stub.instance for stub in stubs]),
                tracer=tracer,
            )
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{LOCAL}:{running.port}"))
        stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
        yield Picking(running=running, sidecars=stubs, engines=behind, stub=stub)


@dataclass(kw_only=True)
class Proxy:
    """One HTTP request as a proxy shows it, over a stream of its own."""

    call: Any
    request_mode: Any = FULL_DUPLEX
    response_mode: Any = FULL_DUPLEX
    subset: Any = None
    received: list[wire.ProcessingResponse] = field(default_factory=list)

    async def send_headers(self, headers: Mapping[str, str], *, end: bool = False) -> None:
        """Show the headers of the request."""
        message = wire.ProcessingRequest(
            request_headers=wire.HttpHeaders(headers=header_map(headers), end_of_stream=end),
            protocol_config=wire.ProtocolConfiguration(
                request_body_mode=self.request_mode, response_body_mode=self.response_mode
            ),
        )
        if self.subset is not None:
            fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
            if isinstance(self.subset, str):
                fields[f"{ENDPOINT}-subset"].string_value = self.subset
            else:
                fields[f"{ENDPOINT}-subset"].list_value.extend(self.subset)
        await self.call.write(message)

    async def send_body(self, body: bytes, *, end: bool = True) -> None:
        """Show a part of the body of the request."""
        await self.call.write(wire.ProcessingRequest(request_body=wire.HttpBody(body=body, end_of_stream=end)))

    async def respond(self, status: int = 200, kind: str = "application/json", served: str | None = None) -> None:
        """Show the headers of the response."""
        message = wire.ProcessingRequest(
            response_headers=wire.HttpHeaders(headers=header_map({":status": str(status), "content-type": kind}))
        )
        if served is not None:
            fields = message.metadata_context.filter_metadata["envoy.lb"].fields
            fields[f"{ENDPOINT}-served"].string_value = served
        await self.call.write(message)

    async def respond_body(self, body: bytes, *, end: bool = True) -> None:
        """Show a part of the body of the response."""
        await self.call.write(wire.ProcessingRequest(response_body=wire.HttpBody(body=body, end_of_stream=end)))

    async def read(self) -> wire.ProcessingResponse:
        """Return the next message of the picker."""
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        self.received.append(message)
        return message

    async def finish(self) -> None:
        """Close our side, as at the end of a request, and wait for the other side to do so."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


def header_map(headers: Mapping[str, str]) -> wire.HeaderMap:
    """Write headers as Envoy does."""
    return wire.HeaderMap(
        headers=[wire.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    )


def completion(**fields: Any) -> bytes:
    """Write the body of a completion."""
    return json.dumps({"model": MODEL, "prompt": "Say hello", **fields}).encode()


def head(path: str = "/v1/completions", method: str = "POST", **more: str) -> dict[str, str]:
    """Return the headers of a request; underscores in names stand for dashes."""
    return {
        ":method": method, ":path": path, ":authority": "x", "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }  # fmt: skip


def set_headers(mutation: wire.HeaderMutation) -> dict[str, str]:
    """Read the headers that a message sets."""
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def chosen(message: wire.ProcessingResponse) -> list[str]:
    """Return the endpoints in an answer, which header and metadata agree on."""
    kind = message.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), message
    header = set_headers(getattr(message, kind).response.header_mutation)[ENDPOINT]
    metadata = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields[ENDPOINT].string_value
    assert header == metadata
    return header.split(",")
