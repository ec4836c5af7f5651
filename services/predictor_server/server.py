"""Runs the sidecars of a node's engines, and their gRPC server."""

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
from services.predictor_server.engine_source import EngineSource
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.metrics import InstanceMetrics, SidecarMetrics
from services.predictor_server.mirror import MirroredEngine, mirroring
from services.predictor_server.profile_watch import ProfileWatch
from services.predictor_server.rank_group import RankGroup
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import SidecarSettings, require_distinct
from services.predictor_server.sidecar import Sidecar
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.supervised_task import supervised

NAME = "predictor"
ENDLESS = tuple(
    f"/block.v1.Predictor/{method}" for method in ("Watch", "PredictStream", "ReserveStream", "ReleaseStream")
)


def serve(engines: Sequence[SidecarSettings], server: ServerSettings, profile: Profile | None) -> None:
    """Run the server until a signal stops it."""
    uvloop.run(_serve(engines, server, profile))


async def _serve(engines: Sequence[SidecarSettings], server: ServerSettings, profile: Profile | None) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with running_sidecars(engines, profile, registry) as sidecars:
        register = partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService(sidecars))
        await serve_until_signalled(NAME, server, [register], registry, endless=ENDLESS)


@asynccontextmanager
async def running_sidecars(
    engines: Sequence[SidecarSettings], profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[list[Sidecar]]:
    """Run a sidecar for each engine of a node while the block runs; their refreshes alternate."""
    require_distinct(engines)
    metrics = SidecarMetrics(registry)
    ranks = RankGroup()
    turn = asyncio.Lock()  # of the checks of profiles: one process at a time
    async with AsyncExitStack() as stack:
        sidecars = []
        for number, settings in enumerate(engines):
            source = await stack.enter_async_context(_engine_source(settings, profile, registry))
            instance_metrics = InstanceMetrics(metrics, settings.instance_id)
            watch = ProfileWatch(
                settings.profile_watch, instance_metrics, turn, state_file=settings.state_file, profile=profile,
                traffic=source if isinstance(source, MirroredEngine) else None,
            )  # fmt: skip
            running = running_sidecar(settings, source, instance_metrics, watch, phase=number / len(engines))
            sidecars.append(await stack.enter_async_context(running))
            if len(engines) > 1:
                ranks.add(sidecars[-1])
        yield sidecars


@asynccontextmanager
async def _engine_source(
    settings: SidecarSettings, profile: Profile | None, registry: CollectorRegistry
) -> AsyncIterator[EngineSource]:
    """Follow an engine by its state file, or by mirroring its traffic, while the block runs."""
    if settings.mirror is not None:
        if profile is None:
            raise ValueError("profile: is missing; an engine that exports no state names none")
        async with mirroring(settings, profile, registry) as mirror:
            yield mirror.source
        return
    source = ExportedEngine(settings.state_file, profile, settings.residual, settings.forget_s)
    try:
        yield source
    finally:
        source.close()


@asynccontextmanager
async def running_sidecar(
    settings: SidecarSettings,
    source: EngineSource,
    metrics: InstanceMetrics,
    watch: ProfileWatch | None = None,
    *,
    phase: float = 0.0,
) -> AsyncIterator[Sidecar]:
    """Run a sidecar while the block runs; `phase` shifts its refreshes by that share of an interval."""
    metrics.set_source(common_pb2.StateSource.Name(source.kind).removeprefix("STATE_SOURCE_").lower())
    sidecar = Sidecar(settings, source, metrics)
    tasks = [
        asyncio.create_task(supervised("checking the engine's health", sidecar.health.watch)),
        asyncio.create_task(supervised("following the engine", partial(_follow, sidecar, phase))),
    ]
    if watch is not None:
        tasks.append(asyncio.create_task(supervised("checking the profile", watch.run)))
    try:
        yield sidecar
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _follow(sidecar: Sidecar, phase: float) -> None:
    """Refresh at every interval, so that a forecast finds most of the work done."""
    interval_s = sidecar.settings.poll_s
    while True:
        async with sidecar.lock:
            sidecar.catch_up()
        await asyncio.sleep((phase * interval_s - time.monotonic()) % interval_s or interval_s)
