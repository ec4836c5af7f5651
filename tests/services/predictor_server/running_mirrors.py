"""Mirroring sidecars for tests: within this process, proxy and gRPC on free ports, before any engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import httpx
from prometheus_client import CollectorRegistry

from predictor.forecast_result import Forecast
from predictor.profile import Profile
from predictor.request import RequestFacts
from protos.block.v1 import predictor_pb2_grpc
from services.predictor_server.engine_source import EngineSource
from services.predictor_server.metrics import InstanceMetrics, SidecarMetrics
from services.predictor_server.mirror import RunningMirror, mirroring
from services.predictor_server.server import ENDLESS, running_sidecar
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.rpc.server import ServerSettings, serving
from tests.services.predictor_server.running_sidecars import A30, NAME, SidecarClient
from tests.services.waiting import PATIENCE_S, until

ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
OWN_PATHS = (
    b" /metrics ",
    b" /v1/models ",
    b" /health ",
    b" /tokenize ",
    b" /version ",
    b" /server_info ",
    b" /get_server_info ",
)  # that the sidecar itself requests


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorClient:
    """A mirroring sidecar, its gRPC client, and an HTTP client of its proxy."""

    rpc: SidecarClient
    mirror: RunningMirror
    http: httpx.AsyncClient

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        await until(holds)

    async def complete(self, **fields: Any) -> httpx.Response:
        """Send a completion request to the proxy."""
        return await self.http.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True, **fields})


@asynccontextmanager
async def mirror_of(
    engine_url: str, *, sidecar: dict[str, Any] | None = None, profile: Profile = A30, **settings: Any
) -> AsyncIterator[MirrorClient]:
    """Run a mirroring sidecar before an engine."""
    mirror_settings = MirrorSettings(
        **{"engine_url": engine_url, "engine": ENGINE, "metrics_s": 0.1, "drain_s": 1.0, **settings}
    )
    sidecar_settings = SidecarSettings(
        **{"instance_id": NAME, "mirror": mirror_settings, "engine_url": engine_url, "fresh_s": 0.0, **(sidecar or {})}
    )
    registry = CollectorRegistry()
    async with (
        mirroring(sidecar_settings, profile, registry) as mirror,
        running_sidecar(sidecar_settings, mirror.source, InstanceMetrics(SidecarMetrics(registry), NAME)) as running,
        serving(
            ServerSettings(drain_s=1.0),
            [partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService([running]))],
            registry,
            endless=ENDLESS,
        ) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{mirror.port}", timeout=PATIENCE_S) as http,
    ):
        rpc = SidecarClient(sidecar=running, stub=predictor_pb2_grpc.PredictorStub(channel), registry=registry)
        yield MirrorClient(rpc=rpc, mirror=mirror, http=http)


@dataclass(slots=True, kw_only=True)
class RawEngine:
    """An HTTP server that replies with the bytes of a test, and keeps the requests that it received."""

    replies: list[bytes] = field(default_factory=list)  # the pieces of every reply
    received: list[bytes] = field(default_factory=list)  # whole requests
    pause: asyncio.Event | None = None  # between the pieces
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request of a connection; the sidecar's own requests get a 404."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if any(path in head for path in OWN_PATHS):
                writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            self.received.append(head + body)
            for number, piece in enumerate(self.replies):
                if number and self.pause is not None:
                    resumed, left = asyncio.ensure_future(self.pause.wait()), asyncio.ensure_future(reader.read(1))
                    try:
                        await asyncio.wait([resumed, left], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        resumed.cancel()
                    if left.done():
                        self.gone.set()
                        return
                    left.cancel()
                    await asyncio.wait([left])
                writer.write(piece)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def raw_engine(*replies: bytes) -> AsyncIterator[RawEngine]:
    """Serve on a free port while the block runs."""
    engine = RawEngine(replies=list(replies))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


def forecast_by(source: EngineSource, request: RequestFacts) -> Forecast:
    """Forecast a request that arrives now in the view of a source."""
    view = source.refresh()
    (forecast,) = view.forecaster.forecast([request], view.now_s, delays=False)
    return forecast
