"""The picker's process: its parts, its ports, and a shutdown that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from prometheus_client import CollectorRegistry

from protos.envoy.v3 import external_processor_pb2_grpc
from scheduler.prefix.prompt import BYTES_PER_TOKEN
from services.endpoint_picker.endpoints import with_addresses
from services.endpoint_picker.health import PickerHealth
from services.endpoint_picker.metrics import PickerMetrics
from services.endpoint_picker.picking import Picker
from services.endpoint_picker.service import ExternalProcessorService
from services.endpoint_picker.settings import PickerSettings
from services.http.prompt_tokens import PromptSizes, PromptTokens
from services.instances.sources import InstanceSource
from services.live_page.pages import live_page_routes
from services.logs import log_event
from services.placement.driver import PlacementDriver
from services.placement.lifecycle import placement_driver
from services.placement.settings import SchedulerSettings
from services.rpc.channels import bind_server, make_server, streams_for
from services.rpc.server import (
    MEBIBYTE,
    freeze_imported_objects,
    metrics_served,
    start_health_port,
    stop_signal,
)
from services.rpc.settings import ServerSettings
from services.security.access_settings import access_controlled
from services.security.certificates import certificates_of
from services.security.metrics import register_tls_metrics
from services.tracing.otlp import TracingSettings, traced

if TYPE_CHECKING:
    from services.tracing.spans import RequestTracer

log = logging.getLogger(__name__)

NAME = "picker"


@dataclass(kw_only=True)
class RunningPicker:
    """A running picker and its ports; it drains from when `is_draining` is set."""

    port: int
    health_port: int | None
    metrics_port: int | None
    picker: Picker
    service: ExternalProcessorService
    driver: PlacementDriver
    is_draining: bool = False


def serve(  # noqa: PLR0913 - all settings of the process
    settings: PickerSettings,
    server: ServerSettings,
    decisions: SchedulerSettings,
    source: InstanceSource,
    poll_s: float,
    *,
    tracing: TracingSettings,
) -> None:
    """Run the picker until SIGTERM or SIGINT."""
    uvloop.run(_serve(settings, server, decisions, source, poll_s, tracing=tracing))


async def _serve(  # noqa: PLR0913 - all settings of the process
    settings: PickerSettings,
    server: ServerSettings,
    decisions: SchedulerSettings,
    source: InstanceSource,
    poll_s: float,
    *,
    tracing: TracingSettings,
) -> None:
    stop = stop_signal()
    if not decisions.scheduler_id:
        decisions = replace(decisions, scheduler_id=f"{socket.gethostname()}/{os.getpid()}")
    async with (
        traced(tracing, f"block-{NAME}") as tracer,
        serving(settings, server, decisions, source, poll_s, tracer=tracer) as running,
    ):
        freeze_imported_objects()
        log_event(
            log, logging.INFO, "serving", server=NAME, host=server.host, port=running.port,
            health_port=running.health_port, metrics_port=running.metrics_port, tls=settings.secure_serving,
            instances=len(running.picker.endpoints),
        )  # fmt: skip
        await stop.wait()
        log_event(log, logging.INFO, "draining", server=NAME, requests=len(running.service))
    log_event(log, logging.INFO, "stopped", server=NAME)


@asynccontextmanager
async def serving(  # noqa: PLR0913 - all settings of the process
    settings: PickerSettings,
    server: ServerSettings,
    decisions: SchedulerSettings,
    source: InstanceSource,
    poll_s: float = 1.0,
    *,
    tracer: RequestTracer | None = None,
) -> AsyncIterator[RunningPicker]:
    """Serve while the block runs; then say that it does not serve, and let the requests under way end."""
    registry = CollectorRegistry()
    metrics = PickerMetrics(registry)
    certificates = certificates_of(server.tls)
    register_tls_metrics(registry, certificates)
    credentials = None
    if settings.secure_serving:
        credentials = certificates.grpc_server_credentials() or self_signed_credentials()
    prompts = PromptTokens(
        PromptSizes(BYTES_PER_TOKEN),
        tokenizer=decisions.tokenizer,
        chat_template=decisions.chat_template,
        block_tokens=decisions.block_tokens,
        seed=decisions.hash_seed,
    )
    async with AsyncExitStack() as stack:
        driver = await stack.enter_async_context(placement_driver(decisions, with_addresses(source), registry, poll_s))
        pages = partial(live_page_routes, driver.tail)
        access = await stack.enter_async_context(access_controlled(server.access, registry))
        metrics_port = await stack.enter_async_context(metrics_served(server, registry, pages, access))
        picker = Picker(settings, driver, prompts, metrics, tracer)
        service = ExternalProcessorService(picker, settings.max_streams)
        metrics.watch(service.__len__)
        running = RunningPicker(
            port=0, health_port=None, metrics_port=metrics_port, picker=picker, service=service, driver=driver
        )
        health = PickerHealth(lambda: not running.is_draining and len(picker.endpoints) > 0)
        # without the interceptor of other servers, which takes a third of a stream's processor time
        main = make_server(
            max_message_bytes=server.max_message_mib * MEBIBYTE, max_streams=streams_for(server.max_concurrency)
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(service, main)
        health_pb2_grpc.add_HealthServicer_to_server(health, main)
        running.port = bind_server(main, server.host, server.port, credentials)
        servers = [main]
        await main.start()
        if server.health_port is not None:
            probes = await start_health_port(server, health)
            running.health_port = probes.port
            servers.append(probes.server)
        try:
            yield running
        finally:
            running.is_draining = True
            await _drained(service, accept_s=settings.accept_s, drain_s=server.drain_s)
            for one in servers:
                await one.stop(None)


def self_signed_credentials() -> grpc.ServerCredentials:
    """Make credentials for proxies that do not verify them."""
    from services.security.development_ca import self_signed  # loads cryptography, which only this needs

    pair = self_signed("Block endpoint picker")
    return grpc.ssl_server_credentials([(pair.key, pair.certificate)])


async def _drained(service: ExternalProcessorService, *, accept_s: float, drain_s: float) -> None:
    """Take requests for a while longer, and wait for those under way."""
    await asyncio.sleep(accept_s)
    try:
        async with asyncio.timeout(drain_s):
            await service.none_left()
    except TimeoutError:
        log_event(log, logging.WARNING, "drain time is over, requests cut off", requests=len(service), drain_s=drain_s)
