"""What every gRPC server of ours shares: address, health, reflection, limits, metrics, draining."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.logs import log_event
from services.rpc.channels import bind_server, make_server, streams_for
from services.rpc.interceptor import CallInterceptor, Handler
from services.rpc.settings import ServerSettings
from services.security.access import AccessControl
from services.security.access_settings import access_controlled
from services.security.certificates import certificates_of
from services.security.metrics import register_tls_metrics

if TYPE_CHECKING:
    from services.http.operator_port import OperatorPort, Routes

log = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], None]  # a generated add_…_to_server with its servicer
Pages = Callable[["OperatorPort"], "Routes"]  # what an operator's port serves beside the metrics

MEBIBYTE = 2**20
READINESS_S = 0.5  # between two looks at what makes a server ready
SETTLE_S = 0.05  # for clients to notice that the server refuses new calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """The ports of a running server."""

    port: int
    metrics_port: int | None
    health_port: int | None = None


def no_problem() -> str:
    """Return the reason why a server is not ready: there is none."""
    return ""


@asynccontextmanager
async def serving(  # noqa: PLR0913 - what any of our servers may need
    settings: ServerSettings,
    services: Sequence[Register],
    registry: CollectorRegistry,
    *,
    endless: Collection[str] = (),
    problem: Callable[[], str] = no_problem,
    pages: Pages | None = None,
    access: AccessControl | None = None,
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; then refuse new calls and wait for those under way, at most `drain_s`.

    `endless` names methods (/package.Service/Method) whose streams end only when the client leaves; draining does not
    wait for them. While there is a `problem`, the services report that they do not serve, and the server that it lives.
    `pages` makes what is served beside the metrics. `access` checks callers, by default as the settings say.
    """
    from grpc_reflection.v1alpha import reflection  # the gateway imports this module, too

    if access is None:
        async with (
            access_controlled(settings.access, registry) as own,
            serving(settings, services, registry, endless=endless, problem=problem, pages=pages, access=own) as running,
        ):
            yield running
        return
    names = service_names(services)
    certificates = certificates_of(settings.tls)
    interceptor = CallInterceptor(
        settings.max_concurrency, registry, names, endless, access=access, certificates=certificates
    )
    server = make_server(
        max_message_bytes=settings.max_message_mib * MEBIBYTE,
        interceptors=(interceptor,),
        max_streams=streams_for(settings.max_concurrency),
    )
    for register in services:
        register(server)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    async with metrics_served(settings, registry, pages, access) as metrics_port:
        port = bind_server(server, settings.host, settings.port, certificates.grpc_server_credentials())
        await server.start()
        probes = await start_health_port(settings, state) if settings.health_port is not None else None
        await _report_readiness(state, names, problem)
        following = asyncio.create_task(_follow_readiness(state, names, problem)) if problem is not no_problem else None
        try:
            health_port = None if probes is None else probes.port
            yield RunningServer(port=port, metrics_port=metrics_port, health_port=health_port)
        finally:
            if following is not None:
                following.cancel()
            await drain(server, state, interceptor, settings.drain_s)
            if probes is not None:
                await probes.server.stop(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPort:
    """A server of grpc.health.v1 alone, without TLS, as probes of Kubernetes have none."""

    server: grpc.aio.Server
    port: int


async def start_health_port(settings: ServerSettings, state: health_pb2_grpc.HealthServicer) -> HealthPort:
    """Serve the health of a server on `health_port`."""
    assert settings.health_port is not None
    server = make_server(max_message_bytes=MEBIBYTE)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    port = bind_server(server, settings.host, settings.health_port, field="health_port")
    await server.start()
    return HealthPort(server=server, port=port)


async def _follow_readiness(state: health.aio.HealthServicer, names: Sequence[str], problem: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(READINESS_S)
        await _report_readiness(state, names, problem)


async def _report_readiness(state: health.aio.HealthServicer, names: Sequence[str], problem: Callable[[], str]) -> None:
    status = health_pb2.HealthCheckResponse.NOT_SERVING if problem() else health_pb2.HealthCheckResponse.SERVING
    for name in names:
        await state.set(name, status)


class _ServiceNames:
    """Stands for a server while generated code registers, to learn the services' names, which no server lists."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignore handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Note a service's name."""
        self.names.append(service)


def service_names(services: Sequence[Register]) -> list[str]:
    """List the full names of services."""
    found = _ServiceNames()
    for register in services:
        register(cast("grpc.aio.Server", found))
    return found.names


async def drain(
    server: grpc.aio.Server, state: health.aio.HealthServicer, interceptor: CallInterceptor, drain_s: float
) -> None:
    """Report not serving, refuse new calls, and stop once only endless streams are under way."""
    await state.enter_graceful_shutdown()
    interceptor.close()  # gRPC's own stop resets calls that are just arriving; a status is better
    await asyncio.sleep(SETTLE_S)
    stopping = asyncio.create_task(server.stop(drain_s + 10 * SETTLE_S))  # longer than the wait below
    try:
        await asyncio.wait_for(interceptor.none_left(), drain_s)
    except TimeoutError:
        log_event(
            log, logging.WARNING, "drain time is over, calls cut off", calls=interceptor.num_finite, drain_s=drain_s
        )
    await server.stop(None)
    await stopping


def stop_signal() -> asyncio.Event:
    """Make the first SIGTERM or SIGINT set an event; a second one does what it does to any process."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        event.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return event


async def serve_until_signalled(  # noqa: PLR0913 - what any of our servers may need
    name: str,
    settings: ServerSettings,
    services: Sequence[Register],
    registry: CollectorRegistry,
    *,
    endless: Collection[str] = (),
    problem: Callable[[], str] = no_problem,
    pages: Pages | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_signal()
    register_tls_metrics(registry, certificates_of(settings.tls))
    async with serving(settings, services, registry, endless=endless, problem=problem, pages=pages) as running:
        fields = {} if running.metrics_port is None else {"metrics_port": running.metrics_port}
        freeze_imported_objects()
        log_event(log, logging.INFO, "serving", server=name, host=settings.host, port=running.port, **fields)
        await stop.wait()
        log_event(log, logging.INFO, "draining", server=name)
    log_event(log, logging.INFO, "stopped", server=name)


def freeze_imported_objects() -> None:
    """Exclude what exists now from garbage collection; each look through all modules takes a tenth of a second."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def metrics_served(
    settings: ServerSettings,
    registry: CollectorRegistry,
    pages: Pages | None = None,
    access: AccessControl | None = None,
) -> AsyncIterator[int | None]:
    """Serve /metrics, and more pages, on a port of its own where `metrics_port` is set."""
    if settings.metrics_port is None:
        yield None
        return
    from services.http.operator_port import OperatorPort, operator_port_served  # not needed without the port

    app = OperatorPort(registry, access)
    if pages is not None:
        app.routes = {**app.routes, **pages(app)}
    tls = certificates_of(settings.tls).server_context
    async with operator_port_served(app, settings.host, settings.metrics_port, tls=tls) as port:
        yield port
