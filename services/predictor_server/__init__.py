"""The sidecar of one engine as a service: what a request would experience there, and promises of places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from predictor.profile import Profile
from protos.block.v1 import predictor_pb2_grpc
from services.grpc_server import ServerSettings, serve_until_signalled
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.measures import Measures
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import SidecarSettings
from services.predictor_server.sidecar import Sidecar

__all__ = ["PredictorService", "SidecarSettings", "serve", "standing_beside"]

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
    source = ExportedEngine(settings.state_file, profile, settings.residual, settings.forget_s)
    sidecar = Sidecar(settings, source, Measures(registry))
    tasks = [asyncio.create_task(sidecar.health.watch()), asyncio.create_task(_keep_up(sidecar))]
    try:
        yield sidecar
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        source.close()


async def _keep_up(sidecar: Sidecar) -> None:
    """Follow the engine also while nobody asks, so that who asks finds most of the work done."""
    while True:
        async with sidecar.lock:
            sidecar.catch_up()
        await asyncio.sleep(sidecar.settings.poll_s)
