"""What every gRPC server of ours shares: where it listens, health, reflection, limits, statuses, metrics, draining."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.logs import log_event
from services.rpc.errors import BusyError, message_of, status_of
from services.rpc.settings import ServerSettings

log = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], None]  # a generated add_…_to_server with its servicer
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic to type checkers alone
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SETTLE_S = 0.05  # for callers to notice that the door is closed
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """Where a server can be reached."""

    port: int
    metrics_port: int | None


@asynccontextmanager
async def serving(
    settings: ServerSettings,
    services: Sequence[Register],
    registry: CollectorRegistry,
    *,
    endless: Collection[str] = (),
) -> AsyncIterator[RunningServer]:
    """Serve while the block runs; then refuse what comes, and wait for what is under way, `drain_s` at most.

    `endless` names methods (/package.Service/Method) whose streams end only when somebody leaves: nobody waits for
    them.
    """
    from grpc_reflection.v1alpha import reflection  # the gateway imports this module, too

    mebibytes = settings.max_message_mib * 2**20
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", mebibytes),
            ("grpc.max_send_message_length", mebibytes),
            ("grpc.so_reuseport", 0),  # or a second server would take half of this one's calls instead of failing
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
    )
    calls = Calls(settings.max_concurrency, registry, endless)
    door = ServiceDoor(server, calls)
    for register in services:
        register(cast("grpc.aio.Server", door))
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    reflection.enable_server_reflection([*door.names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    with metrics_served(settings, registry) as metrics_port:
        port = listen(server, settings)
        await server.start()
        for name in door.names:
            await state.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            yield RunningServer(port=port, metrics_port=metrics_port)
        finally:
            await drain(server, state, calls, settings.drain_s)


async def drain(server: grpc.aio.Server, state: health.aio.HealthServicer, calls: Calls, drain_s: float) -> None:
    """Say that the end is near, take nothing new, and end as soon as nothing is under way but endless streams."""
    await state.enter_graceful_shutdown()
    calls.close()  # gRPC's own stop resets calls that are just coming in: they had better be told
    await asyncio.sleep(SETTLE_S)
    stopping = asyncio.create_task(server.stop(drain_s + 10 * SETTLE_S))  # longer than what is waited for here
    try:
        await asyncio.wait_for(calls.none_left(), drain_s)
    except TimeoutError:
        log_event(log, logging.WARNING, "cut off", calls=calls.num_finite, drain_s=drain_s)
    await server.stop(None)
    await stopping


def stop_signal() -> asyncio.Event:
    """Make SIGTERM and SIGINT set an event, once; a second signal does what it does to any process."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        event.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return event


async def serve_until_signalled(
    name: str,
    settings: ServerSettings,
    services: Sequence[Register],
    registry: CollectorRegistry,
    *,
    endless: Collection[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_signal()
    async with serving(settings, services, registry, endless=endless) as here:
        fields = {} if here.metrics_port is None else {"metrics_port": here.metrics_port}
        leave_modules_alone()
        log_event(log, logging.INFO, "serving", server=name, host=settings.host, port=here.port, **fields)
        await stop.wait()
        log_event(log, logging.INFO, "draining", server=name)
    log_event(log, logging.INFO, "stopped", server=name)


def leave_modules_alone() -> None:
    """Keep the garbage collector from what importing has made: looking through that again takes a tenth of a second."""
    gc.collect()
    gc.freeze()


def listen(server: grpc.aio.Server, settings: ServerSettings) -> int:
    """Bind a server; where that cannot be, say why in one line."""
    refuse_taken(settings.host, settings.port, "port")  # gRPC would print its own lines about it
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        return server.add_insecure_port(f"{host}:{settings.port}")
    except RuntimeError:
        raise ValueError(f"host: {settings.host} port {settings.port} cannot be listened on") from None


def refuse_taken(host: str, port: int, field: str) -> None:
    """Try to bind an address, and let it go again."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"host: {host!r} is no address of this machine") from None
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(f"host: {host!r} is no address of this machine") from None
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise ValueError(f"{field}: {port} on {host} {reason}") from None


@contextmanager
def metrics_served(settings: ServerSettings, registry: CollectorRegistry) -> Iterator[int | None]:
    """Answer /metrics on a port of its own, where one is wanted."""
    if settings.metrics_port is None:
        yield None
        return
    refuse_taken(settings.host, settings.metrics_port, "metrics_port")
    httpd, thread = start_http_server(settings.metrics_port, settings.host, registry)
    try:
        yield httpd.server_port
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class ServiceDoor:
    """Where generated code puts its servicers: each method is guarded before the server gets it."""

    def __init__(self, server: grpc.aio.Server, calls: Calls) -> None:
        """Stand before a server."""
        self._server = server
        self._calls = calls
        self.names: list[str] = []

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Guard every method of a service."""
        self.names.append(service)
        guarded = {name: self._calls.guard(f"/{service}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Let the unguarded form of the same methods lie."""


class Calls:
    """The calls under way: no more than `most`, each timed, its failures turned into statuses."""

    def __init__(self, most: int, registry: CollectorRegistry, endless: Collection[str] = ()) -> None:
        """Start with none."""
        self._most = most
        self._endless = frozenset(endless)
        self._closed = False
        self._num = self.num_finite = 0
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._ended = Counter("block_grpc_requests", "Calls ended.", ("method", "code"), registry=registry)
        self._seconds = Histogram(
            "block_grpc_request_seconds", "How long calls took.", ("method",), buckets=SECONDS, registry=registry
        )
        under_way = Gauge("block_grpc_requests_in_flight", "Calls under way.", registry=registry)
        under_way.set_function(lambda: self._num)

    def close(self) -> None:
        """Take no more; what is under way goes on."""
        self._closed = True

    async def none_left(self) -> None:
        """Wait until no call is under way but endless ones."""
        await self._none_left.wait()

    def guard(self, method: str, handler: Handler) -> Handler:
        """Put a method's handler behind the limits; its requests are parsed within, so that garbage has a status too.

        Methods that stream their response must be asynchronous generators.
        """
        parse = cast("Callable[[bytes], Any]", handler.request_deserializer)
        write = handler.response_serializer

        async def unary_unary(raw: bytes, context: Context) -> Any:
            async with self._under_way(method, context):
                return await cast("Any", handler.unary_unary)(parse(raw), context)

        async def unary_stream(raw: bytes, context: Context) -> None:
            async with self._under_way(method, context):
                await _send(cast("Any", handler.unary_stream)(parse(raw), context), context)

        async def stream_unary(raws: AsyncIterator[bytes], context: Context) -> Any:
            async with self._under_way(method, context):
                return await cast("Any", handler.stream_unary)(_parsed(raws, parse), context)

        async def stream_stream(raws: AsyncIterator[bytes], context: Context) -> None:
            async with self._under_way(method, context):
                await _send(cast("Any", handler.stream_stream)(_parsed(raws, parse), context), context)

        if handler.request_streaming:
            if handler.response_streaming:
                return grpc.stream_stream_rpc_method_handler(stream_stream, None, write)
            return grpc.stream_unary_rpc_method_handler(stream_unary, None, write)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(unary_stream, None, write)
        return grpc.unary_unary_rpc_method_handler(unary_unary, None, write)

    @asynccontextmanager
    async def _under_way(self, method: str, context: Context) -> AsyncIterator[None]:
        """Count and time a call, and give what goes wrong in it a status."""
        start_s = time.monotonic()
        code = grpc.StatusCode.OK
        self._enter(method)
        try:
            self._refuse_beyond_limits(context)
            yield
        except grpc.aio.AbortError:
            code = context.code()
            raise
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            code = status_of(error).grpc_code
            if code is grpc.StatusCode.INTERNAL:
                log.exception("failed", extra={"fields": {"method": method}})
            await context.abort(code, message_of(error))
        finally:
            self._leave(method)
            self._ended.labels(method, code.name).inc()
            self._seconds.labels(method).observe(time.monotonic() - start_s)

    def _refuse_beyond_limits(self, context: Context) -> None:
        if self._closed:
            raise ConnectionError("this server is about to end: ask another")
        if self._num > self._most:
            raise BusyError(f"{self._most} calls are under way, as many as may be")
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("came after its deadline")

    def _enter(self, method: str) -> None:
        self._num += 1
        if method not in self._endless:
            self.num_finite += 1
            self._none_left.clear()

    def _leave(self, method: str) -> None:
        self._num -= 1
        if method not in self._endless:
            self.num_finite -= 1
            if self.num_finite == 0:
                self._none_left.set()


async def _send(responses: Any, context: Context) -> None:
    """Send what a method yields; a caller who leaves closes it at once."""
    async with aclosing(responses) as open_responses:
        async for response in open_responses:
            await context.write(response)


async def _parsed(raws: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for raw in raws:
        yield parse(raw)
