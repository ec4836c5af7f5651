"""Mirroring sidecars for tests: within this process, proxy and gRPC on free ports, before any engine."""

from __future__ import annotations

import asyncio
import time
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
from predictor.request import Request
from protos.block.v1 import predictor_pb2_grpc
from services.predictor_server.engine_view import EngineSource
from services.predictor_server.metrics import InstanceMetrics, SidecarMetrics
from services.predictor_server.mirroring import Mirroring, mirroring
from services.predictor_server.server import PredictorService, keeping_up
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.rpc.server import ServerSettings, serving
from tests.services.predictor_server.asking import A30, NAME, PATIENCE_S, Asked

ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "enable_prefix_caching": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored:
    """A mirroring sidecar, its client, and a client of its proxy."""

    asked: Asked
    mirroring: Mirroring
    client: httpx.AsyncClient
    sidecar: SidecarSettings

    async def until(self, holds: Callable[[], bool]) -> None:
        """Look until something holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "waited in vain"
            await asyncio.sleep(0.02)

    async def complete(self, **fields: Any) -> httpx.Response:
        """Ask for a completion through the proxy."""
        return await self.client.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True, **fields})

    async def num_known(self) -> int:
        """How many requests the mirror has on its engine."""
        indicators = (await self.asked.predict()).indicators
        return int(indicators.num_running + indicators.num_waiting)


@asynccontextmanager
async def mirror_of(
    engine_url: str, *, sidecar: dict[str, Any] | None = None, profile: Profile = A30, **settings: Any
) -> AsyncIterator[Mirrored]:
    """Stand before an engine."""
    mirror = MirrorSettings(
        **{"engine_url": engine_url, "engine": ENGINE, "metrics_s": 0.1, "drain_s": 1.0, **settings}
    )
    told = SidecarSettings(
        **{"instance_id": NAME, "mirror": mirror, "engine_url": engine_url, "fresh_s": 0.0, **(sidecar or {})}
    )
    registry = CollectorRegistry()
    async with (
        mirroring(told, profile, registry) as standing,
        keeping_up(told, standing.source, InstanceMetrics(SidecarMetrics(registry), NAME)) as running,
        serving(
            ServerSettings(drain_s=1.0),
            [partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService([running]))],
            registry,
            endless=["/block.v1.Predictor/Watch"],
        ) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{standing.port}", timeout=PATIENCE_S) as client,
    ):
        asked = Asked(sidecar=running, stub=predictor_pb2_grpc.PredictorStub(channel), registry=registry)
        yield Mirrored(asked=asked, mirroring=standing, client=client, sidecar=told)


@dataclass(slots=True, kw_only=True)
class RawEngine:
    """An HTTP server that says, byte for byte, what a test has it say, and remembers what it was told."""

    answers: list[bytes] = field(default_factory=list)  # the pieces of every answer
    told: list[bytes] = field(default_factory=list)  # whole requests
    pause: asyncio.Event | None = None  # between the pieces
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request of a connection; what is asked for by the sidecar itself is not there."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body = await reader.readexactly(length)
            if any(path in head for path in (b" /metrics ", b" /v1/models ", b" /health ", b" /tokenize ")):
                writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            self.told.append(head + body)
            for place, piece in enumerate(self.answers):
                if place and self.pause is not None:
                    held, left = asyncio.ensure_future(self.pause.wait()), asyncio.ensure_future(reader.read(1))
                    await asyncio.wait([held, left], return_when=asyncio.FIRST_COMPLETED)
                    if left.done():
                        self.gone.set()
                        held.cancel()
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
async def raw_engine(*answers: bytes) -> AsyncIterator[RawEngine]:
    """Serve on a free port while the block runs."""
    engine = RawEngine(answers=list(answers))
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


def forecast_by(source: EngineSource, request: Request) -> Forecast:
    """What a source's picture says of a request that came now."""
    picture = source.look()
    (forecast,) = picture.forecaster.forecast([request], picture.now_s, delays=False)
    return forecast
