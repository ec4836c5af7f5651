"""The sidecar of one engine as a service: what a request would experience there, and promises of places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from predictor.profile import Profile
from protos.block.v1 import common_pb2, predictor_pb2_grpc
from services.grpc_server import ServerSettings, serve_until_signalled
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.measures import Measures
from services.predictor_server.mirroring import mirroring
from services.predictor_server.picture import EngineSource
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.predictor_server.sidecar import Sidecar

__all__ = ["MirrorSettings", "PredictorService", "SidecarSettings", "serve", "standing_beside"]

NAME = "predictor"
ENDLESS = ("/block.v1.Predictor/Watch", "/block.v1.Predictor/PredictStream")


def serve(settings: SidecarSettings, server: ServerSettings, profile: Profile | None) -> None:
    """Run the service until it is told to stop."""
    uvloop.run(_serve(settings, server, profile))


async def _serve(settings: SidecarSettings, server: ServerSettings, profile: Profile | None) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with standing_beside(settings, profile, registry) as sidecar:
        register = partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService(sidecar))
        await serve_until_signalled(NAME, server, [register], registry, endless=ENDLESS)


@asynccontextmanager
async def standing_beside(
    settings: SidecarSettings, profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[Sidecar]:
    """Follow an engine while the block runs."""
    async with following(settings, profile, registry) as source, keeping_up(settings, source, registry) as sidecar:
        yield sidecar


@asynccontextmanager
async def following(
    settings: SidecarSettings, profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[EngineSource]:
    """Follow an engine by what it shows, or by mirroring what passes on its way."""
    if settings.mirror is not None:
        if profile is None:
            raise ValueError("profile: is missing, and an engine that shows nothing names none")
        async with mirroring(
            settings.mirror, profile, registry, residual=settings.residual, forget_s=settings.forget_s
        ) as mirror:
            yield mirror.source
        return
    source = ExportedEngine(settings.state_file, profile, settings.residual, settings.forget_s)
    try:
        yield source
    finally:
        source.close()


@asynccontextmanager
async def keeping_up(
    settings: SidecarSettings, source: EngineSource, registry: CollectorRegistry
) -> AsyncIterator[Sidecar]:
    """Let a sidecar stand over what is known of the engine while the block runs."""
    measures = Measures(registry)
    measures.source.labels(common_pb2.StateSource.Name(source.kind).removeprefix("STATE_SOURCE_").lower()).set(1)
    sidecar = Sidecar(settings, source, measures)
    tasks = [asyncio.create_task(sidecar.health.watch()), asyncio.create_task(_keep_up(sidecar))]
    try:
        yield sidecar
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _keep_up(sidecar: Sidecar) -> None:
    """Follow the engine also while nobody asks, so that who asks finds most of the work done."""
    while True:
        async with sidecar.lock:
            sidecar.catch_up()
        await asyncio.sleep(sidecar.settings.poll_s)
