"""The scheduler as a service: asks the sidecars, decides, reserves; remembers nothing that a restart must keep."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from protos.block.v1 import scheduler_pb2_grpc
from services.http.client import HttpClient
from services.instances import FromName, InstanceSource, watch
from services.placement.settings import SchedulerSettings
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.scheduler_server.decision_recorder import DecisionRecorder
from services.scheduler_server.instance_registry import InstanceRegistry
from services.scheduler_server.length_resolution import LengthResolver
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.provisioner_reports import ProvisionerReports
from services.scheduler_server.service import SchedulerService
from services.supervised_task import supervised

__all__ = ["SchedulerService", "SchedulerSettings", "scheduling", "serve"]

NAME = "scheduler"
MEBIBYTE = 2**20


def serve(settings: SchedulerSettings, server: ServerSettings, source: InstanceSource, poll_s: float) -> None:
    """Run the service until it is told to stop."""
    uvloop.run(_serve(settings, server, source, poll_s))


async def _serve(settings: SchedulerSettings, server: ServerSettings, source: InstanceSource, poll_s: float) -> None:
    if not settings.scheduler_id:
        settings = replace(settings, scheduler_id=f"{socket.gethostname()}/{os.getpid()}")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with scheduling(settings, source, registry, poll_s) as service:
        register = partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)
        await serve_until_signalled(NAME, server, [register], registry)


@asynccontextmanager
async def scheduling(
    settings: SchedulerSettings, source: InstanceSource, registry: CollectorRegistry, poll_s: float = 1.0
) -> AsyncIterator[SchedulerService]:
    """Follow the instances while the block runs; a list that is bad at the start is refused, a DNS name may wait."""
    measures = SchedulerMetrics(registry)
    fleet, lengths, client = InstanceRegistry(settings, measures), LengthResolver(settings, measures), HttpClient()
    reports = ProvisionerReports(settings.provisioners, settings.scheduler_id)
    watching = recorder = None
    try:
        recorder = recorder_of(settings, measures)
        try:
            fleet.update(await source.poll() or ())
        except ValueError:
            if not isinstance(source, FromName):
                raise
        watching = asyncio.create_task(supervised("watching the list", partial(watch, source, poll_s, fleet.update)))
        yield SchedulerService(settings, fleet, lengths, measures, client, recorder, reports)
    finally:
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        await fleet.close()
        await lengths.close()
        await reports.close()
        client.close()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)


def recorder_of(settings: SchedulerSettings, measures: SchedulerMetrics) -> DecisionRecorder | None:
    """Begin to record, where that is wanted."""
    if not settings.record:
        return None
    most_bytes = round(settings.record_mib * MEBIBYTE)
    return DecisionRecorder(settings.record, share=settings.record_share, most_bytes=most_bytes, measures=measures)
