"""The gateway's process: its parts, its socket, and a shutdown that lets streams finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop
from prometheus_client import CollectorRegistry

from protos.block.v1 import scheduler_pb2_grpc
from services.gateway.announced_paths import AnnouncedPaths
from services.gateway.app import Gateway
from services.gateway.context import GatewayContext
from services.gateway.destinations import Fallback, OutlierDetection
from services.gateway.kept_responses import KeptResponses
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.release_queue import ReleaseQueue
from services.gateway.schedulers import InProcessScheduler, SchedulerClient, Schedulers
from services.gateway.settings import GatewaySettings
from services.http.engine_client import engine_client
from services.http.prompt_tokens import PromptSizes, PromptTokens
from services.http.server import answering, listening
from services.instances.draining_requests import DrainingRequests
from services.instances.sources import InstanceSource
from services.logs import log_event
from services.objectives import ObjectiveTable, following, no_objectives
from services.placement.decision_time import DECIDE_S
from services.placement.driver import PlacementDriver
from services.placement.instance_pages import instance_routes
from services.placement.lifecycle import placement_driver
from services.placement.service import ENDLESS, SchedulerService
from services.placement.settings import SchedulerSettings
from services.retry_budget import RetryBudget
from services.rpc.server import freeze_imported_objects, metrics_served, stop_signal
from services.rpc.server import serving as rpc_serving
from services.rpc.settings import ServerSettings
from services.security.access import AccessControl
from services.security.access_settings import access_controlled
from services.security.certificates import certificates_of
from services.security.metrics import register_tls_metrics
from services.security.own_key import own_key
from services.supervised_task import supervised
from services.tracing.otlp import TracingSettings, traced

if TYPE_CHECKING:
    from services.tracing.spans import RequestTracer

log = logging.getLogger(__name__)

NAME = "gateway"
FLUSH_S = 5.0  # for the last releases
NO_TRACES = TracingSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
    """A running gateway and its port."""

    port: int
    gateway: Gateway
    scheduler_port: int | None = None  # of block.v1.Scheduler, where it is served beside it
    metrics_port: int | None = None  # for operators
    driver: PlacementDriver | None = None  # where it decides by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessDecisions:
    """What a gateway needs to decide by itself; `rpc` serves block.v1.Scheduler beside it, where it is given."""

    settings: SchedulerSettings
    source: InstanceSource
    poll_s: float = 1.0
    rpc: ServerSettings | None = None


def serve(
    settings: GatewaySettings,
    server: ServerSettings,
    decisions: InProcessDecisions | None = None,
    tracing: TracingSettings = NO_TRACES,
) -> None:
    """Run the gateway until SIGTERM or SIGINT."""
    uvloop.run(serve_until_signalled(settings, server, decisions, tracing))


async def serve_until_signalled(
    settings: GatewaySettings,
    server: ServerSettings,
    decisions: InProcessDecisions | None = None,
    tracing: TracingSettings = NO_TRACES,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_signal()
    async with (
        traced(tracing, f"block-{NAME}") as tracer,
        serving(settings, server, decisions, tracer) as running,
    ):
        freeze_imported_objects()
        log_event(
            log, logging.INFO, "serving", server=NAME, host=server.host, port=running.port,
            scheduler_port=running.scheduler_port, metrics_port=running.metrics_port,
        )  # fmt: skip
        await stop.wait()
        log_event(log, logging.INFO, "draining", server=NAME, requests=len(running.gateway))
    log_event(log, logging.INFO, "stopped", server=NAME)


@asynccontextmanager
async def deciding(  # noqa: PLR0913, PLR0917 - what either way needs
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    registry: CollectorRegistry,
    decisions: InProcessDecisions | None,
    tracer: RequestTracer | None,
    access: AccessControl,
) -> AsyncIterator[tuple[SchedulerClient, PlacementDriver | None, int | None]]:
    """Have decisions while the block runs, by remote schedulers or by a driver in this process, with its gRPC port."""
    failures = metrics.scheduler_failures
    if decisions is None:
        within_s = DECIDE_S if settings.schedule_s is None else settings.schedule_s  # their policy is not known here
        schedulers = Schedulers(
            settings.schedulers, within_s=within_s, failures=failures, key=own_key(settings.part_key_file)
        )
        try:
            yield schedulers, None, None
        finally:
            await schedulers.close()
        return
    async with placement_driver(decisions.settings, decisions.source, registry, decisions.poll_s) as driver:
        local = InProcessScheduler(driver, within_s=settings.schedule_s, failures=failures)
        if decisions.rpc is None:
            yield local, driver, None
            return
        client = engine_client()
        service = SchedulerService(driver, client, registry, tracer)
        register = partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)
        try:
            async with rpc_serving(
                decisions.rpc, [register], registry, endless=ENDLESS, problem=driver.registered.problem, access=access
            ) as running:
                yield local, driver, running.port
        finally:
            client.close()


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    server: ServerSettings,
    decisions: InProcessDecisions | None = None,
    tracer: RequestTracer | None = None,
) -> AsyncIterator[RunningGateway]:
    """Serve while the block runs; then refuse new requests and let those under way end, at most `drain_s`."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    prompts = PromptTokens(
        PromptSizes(settings.bytes_per_token),
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
        block_tokens=settings.block_tokens,
        seed=settings.hash_seed,
    )
    async with AsyncExitStack() as stack:
        also = no_objectives if decisions is None else decisions.source.objectives
        key_file = server.access.api_key_file
        if decisions is not None and key_file and not decisions.settings.tenants:
            decisions = replace(decisions, settings=replace(decisions.settings, tenants=key_file))
        access = await stack.enter_async_context(access_controlled(server.access, registry))
        objectives = ObjectiveTable(settings.objectives, required=access.keys.objectives, also=also)
        await stack.enter_async_context(following(objectives))
        listener = stack.enter_context(listening(server.host, server.port))
        certificates = certificates_of(server.tls)
        register_tls_metrics(registry, certificates)
        schedulers, driver, scheduler_port = await stack.enter_async_context(
            deciding(settings, metrics, registry, decisions, tracer, access)
        )
        pages = None if driver is None else partial(instance_routes, driver)
        metrics_port = await stack.enter_async_context(metrics_served(server, registry, pages, access=access))
        context = await stack.enter_async_context(
            gateway_context(settings, metrics, schedulers, prompts, objectives, tracer)
        )
        gateway = Gateway(context, access)
        async with answering(gateway, listener, server.drain_s, tls=certificates.server_context):
            port = listener.getsockname()[1]
            yield RunningGateway(
                port=port, gateway=gateway, scheduler_port=scheduler_port, metrics_port=metrics_port, driver=driver
            )


@asynccontextmanager
async def gateway_context(  # noqa: PLR0913, PLR0917 - its parts
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    schedulers: SchedulerClient,
    prompts: PromptTokens,
    objectives: ObjectiveTable,
    tracer: RequestTracer | None,
) -> AsyncIterator[GatewayContext]:
    """Make what all requests share; at the end, report the last ends of requests."""
    releases = ReleaseQueue(
        schedulers.release, max_waiting=settings.releases_kept, delivered=metrics.released, lost=metrics.lost
    )
    engines = engine_client(connect_s=settings.connect_s)
    loop = asyncio.get_running_loop()
    last_resort = Fallback(settings.engine_urls, loop.time)
    requests = DrainingRequests(lambda reason: metrics.drain_stays.labels(reason).inc())
    following_drains = asyncio.create_task(supervised("drains", lambda: schedulers.follow_drains(requests.follow)))
    announced = AnnouncedPaths(schedulers, last_resort, engines)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(requests.close)
        stack.callback(following_drains.cancel)
        stack.push_async_callback(releases.flush, FLUSH_S)
        stack.callback(engines.close)
        stack.callback(announced.close)
        yield GatewayContext(
            settings=settings,
            metrics=metrics,
            schedulers=schedulers,
            engines=engines,
            releases=releases,
            budget=RetryBudget(max_retries=settings.max_concurrency, per_request=settings.retry_ratio),
            migrations=RetryBudget(max_retries=settings.max_concurrency, per_request=settings.migration_ratio),
            requests=requests,
            prompts=prompts,
            last_resort=last_resort,
            failed_lately=OutlierDetection(loop.time),
            models=Models(settings.models, schedulers, last_resort, engines),
            announced=announced,
            kept=KeptResponses(),
            objectives=objectives,
            loop=loop,
            tracer=tracer,
        )
