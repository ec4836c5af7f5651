"""The scheduler as a gRPC server: the placement driver behind block.v1.Scheduler."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

from protos.block.v1 import scheduler_pb2_grpc
from services.http.engine_client import engine_client
from services.instances.sources import InstanceSource
from services.live_page.pages import live_page_routes
from services.placement.instance_pages import instance_routes
from services.placement.lifecycle import placement_driver
from services.placement.service import ENDLESS, SchedulerService
from services.placement.settings import SchedulerSettings
from services.rpc.server import serve_until_signalled
from services.rpc.settings import ServerSettings
from services.tracing.otlp import TracingSettings, traced

if TYPE_CHECKING:
    from services.http.operator_port import OperatorPort, Routes
    from services.tracing.spans import RequestTracer

__all__ = ["SchedulerService", "SchedulerSettings", "scheduling", "serve"]

NAME = "scheduler"


def serve(
    settings: SchedulerSettings,
    server: ServerSettings,
    source: InstanceSource,
    poll_s: float,
    tracing: TracingSettings,
) -> None:
    """Run the server until it is signalled to stop."""
    uvloop.run(_serve(settings, server, source, poll_s, tracing))


async def _serve(
    settings: SchedulerSettings,
    server: ServerSettings,
    source: InstanceSource,
    poll_s: float,
    tracing: TracingSettings,
) -> None:
    if not settings.scheduler_id:
        settings = replace(settings, scheduler_id=f"{socket.gethostname()}/{os.getpid()}")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    async with (
        traced(tracing, f"block-{NAME}") as tracer,
        scheduling(settings, source, registry, poll_s, tracer) as service,
    ):
        register = partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)

        def pages(app: OperatorPort) -> Routes:
            return {**live_page_routes(service.driver.tail, app), **instance_routes(service.driver, app)}

        await serve_until_signalled(
            NAME, server, [register], registry, endless=ENDLESS, problem=service.driver.registered.problem, pages=pages
        )


@asynccontextmanager
async def scheduling(
    settings: SchedulerSettings,
    source: InstanceSource,
    registry: CollectorRegistry,
    poll_s: float = 1.0,
    tracer: RequestTracer | None = None,
) -> AsyncIterator[SchedulerService]:
    """Make the service over the instances of a source; it ends with the context."""
    async with placement_driver(settings, source, registry, poll_s) as driver:
        client = engine_client()
        try:
            yield SchedulerService(driver, client, registry, tracer)
        finally:
            client.close()
