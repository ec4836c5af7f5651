"""The sidecars of a node's engines as a service: what a request would experience there, and promises of places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from predictor.profile import Profile
from protos.block.v1 import common_pb2, predictor_pb2_grpc
from services.predictor_server.engine_view import EngineSource
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.metrics import InstanceMetrics, SidecarMetrics
from services.predictor_server.mirroring import mirroring
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import SidecarSettings, require_distinct
from services.predictor_server.sidecar import Sidecar
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.supervised_task import supervised

NAME = "predictor"
ENDLESS = tuple(f"/block.v1.Predictor/{method}" for method in ("Watch", "PredictStream", "ReserveStream"))


def serve(engines: Sequence[SidecarSettings], server: ServerSettings, profile: Profile | None) -> None:
    """Run the service until it is told to stop."""
    uvloop.run(_serve(engines, server, profile))


async def _serve(engines: Sequence[SidecarSettings], server: ServerSettings, profile: Profile | None) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with standing_beside(engines, profile, registry) as sidecars:
        register = partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService(sidecars))
        await serve_until_signalled(NAME, server, [register], registry, endless=ENDLESS)


@asynccontextmanager
async def standing_beside(
    engines: Sequence[SidecarSettings], profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[list[Sidecar]]:
    """Follow the engines of a node while the block runs."""
    require_distinct(engines)
    measures = SidecarMetrics(registry)
    async with AsyncExitStack() as stack:
        sidecars = []
        for place, settings in enumerate(engines):
            source = await stack.enter_async_context(following(settings, profile, registry))
            counted = InstanceMetrics(measures, settings.instance_id)
            keeping = keeping_up(settings, source, counted, phase=place / len(engines))
            sidecars.append(await stack.enter_async_context(keeping))
        yield sidecars


@asynccontextmanager
async def following(
    settings: SidecarSettings, profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[EngineSource]:
    """Follow an engine by what it shows, or by mirroring what passes on its way."""
    if settings.mirror is not None:
        if profile is None:
            raise ValueError("profile: is missing, and an engine that shows nothing names none")
        async with mirroring(settings, profile, registry) as mirror:
            yield mirror.source
        return
    source = ExportedEngine(settings.state_file, profile, settings.residual, settings.forget_s)
    try:
        yield source
    finally:
        source.close()


@asynccontextmanager
async def keeping_up(
    settings: SidecarSettings, source: EngineSource, measures: InstanceMetrics, *, phase: float = 0.0
) -> AsyncIterator[Sidecar]:
    """Let a sidecar stand over what is known of the engine while the block runs; those of one node look in turn."""
    measures.comes_from(common_pb2.StateSource.Name(source.kind).removeprefix("STATE_SOURCE_").lower())
    sidecar = Sidecar(settings, source, measures)
    tasks = [
        asyncio.create_task(supervised("asking for health", sidecar.health.watch)),
        asyncio.create_task(supervised("following the engine", partial(_keep_up, sidecar, phase))),
    ]
    try:
        yield sidecar
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _keep_up(sidecar: Sidecar, phase: float) -> None:
    """Follow the engine also while nobody asks, so that who asks finds most of the work done."""
    every_s = sidecar.settings.poll_s
    while True:
        async with sidecar.lock:
            sidecar.catch_up()
        await asyncio.sleep((phase * every_s - time.monotonic()) % every_s or every_s)
