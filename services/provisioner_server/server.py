"""The provisioner's process: receives reports of schedulers, and sizes a pool of instances."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from protos.block.v1 import provisioner_pb2_grpc
from services.provisioner_server.hooks import DryRun, Hook
from services.provisioner_server.leader import LEASE, Leader
from services.provisioner_server.lease import FileLease, Lease
from services.provisioner_server.metrics import ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.service import ProvisionerService
from services.provisioner_server.settings import ProvisionerSettings
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.supervised_task import supervised

NAME = "provisioner"
ENDLESS = ("/block.v1.Provisioner/Report", "/block.v1.Provisioner/History")

MakeHook = Callable[[], Hook]
MakeLease = Callable[[str], Lease]  # of the provisioner's id


def serve(
    settings: ProvisionerSettings, server: ServerSettings, hook: MakeHook, lease: MakeLease | None = None
) -> None:
    """Run the service until SIGTERM or SIGINT; instances keep running."""
    asyncio.run(_serve(settings, server, hook, lease))


async def _serve(
    settings: ProvisionerSettings, server: ServerSettings, hook: MakeHook, lease: MakeLease | None
) -> None:
    if not settings.provisioner_id:
        settings = replace(settings, provisioner_id=f"{socket.gethostname()}/{os.getpid()}")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    held = lease(settings.provisioner_id) if lease else None
    async with provisioning(settings, hook(), registry, held) as service:
        register = partial(provisioner_pb2_grpc.add_ProvisionerServicer_to_server, service)
        await serve_until_signalled(NAME, server, [register], registry, endless=ENDLESS)


@asynccontextmanager
async def provisioning(
    settings: ProvisionerSettings, hook: Hook, registry: CollectorRegistry, lease: Lease | None = None
) -> AsyncIterator[ProvisionerService]:
    """Size a pool while the block runs."""
    metrics = ProvisionerMetrics(registry)
    pool = Pool(settings, metrics)
    lease = lease or FileLease(Path(settings.folder) / LEASE, settings.provisioner_id)
    leader = Leader(pool, DryRun() if settings.dry_run else hook, lease, metrics)
    leading = asyncio.create_task(supervised("sizing the pool", leader.run))
    try:
        yield ProvisionerService(pool, leader)
    finally:
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
        await leader.close()
        if settings.dry_run:
            await hook.close()
