"""The gateway as a process: uvicorn on uvloop, a socket of its own, and an end that lets streams finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from services.gateway.app import Gateway
from services.gateway.keys import ApiKeys
from services.gateway.metrics import Metrics
from services.gateway.models import Models
from services.gateway.places import FailedLately, LastResort
from services.gateway.prompt_sizes import PromptSizes
from services.gateway.releases import Releases
from services.gateway.retries import RetryBudget
from services.gateway.schedulers import Schedulers
from services.gateway.settings import GatewaySettings
from services.gateway.shared import Shared
from services.grpc_server import ServerSettings, metrics_served, refuse_taken, stop_signal
from services.http_client import HttpClient
from services.log_lines import say

log = logging.getLogger(__name__)

NAME = "gateway"
BACKLOG = 2048
KEEP_ALIVE_S = 75  # clients' idle connections
FLUSH_S = 5.0  # for the last releases
SETTLE_S = 2  # from cutting off what is under way to closing its connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A gateway that can be reached."""

    port: int
    gateway: Gateway


def serve(settings: GatewaySettings, server: ServerSettings, keys: ApiKeys) -> None:
    """Run the gateway until it is told to stop."""
    uvloop.run(serve_until_signalled(settings, server, keys))


async def serve_until_signalled(settings: GatewaySettings, server: ServerSettings, keys: ApiKeys) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = stop_signal()
    async with serving(settings, server, keys) as here:
        gc.collect()
        gc.freeze()  # what is there now stays
        say(log, logging.INFO, "serving", server=NAME, host=server.host, port=here.port)
        await stop.wait()
        say(log, logging.INFO, "draining", server=NAME, requests=len(here.gateway))
    say(log, logging.INFO, "stopped", server=NAME)


@asynccontextmanager
async def serving(settings: GatewaySettings, server: ServerSettings, keys: ApiKeys) -> AsyncIterator[Serving]:
    """Serve while the block runs; then take nothing new, and let what is under way end, `drain_s` at most."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    with listening(server.host, server.port) as own, metrics_served(server, registry):
        schedulers = Schedulers(settings.schedulers, within_s=settings.schedule_s, failures=metrics.scheduler_failures)
        releases = Releases(schedulers.release, most=settings.releases_kept, told=metrics.released, lost=metrics.lost)
        engines = HttpClient(connect_s=settings.connect_s)
        loop = asyncio.get_running_loop()
        last_resort = LastResort(settings.engine_urls, loop.time)
        shared = Shared(
            settings=settings,
            metrics=metrics,
            schedulers=schedulers,
            engines=engines,
            releases=releases,
            budget=RetryBudget(most=settings.max_concurrency, per_request=settings.retry_ratio),
            sizes=PromptSizes(settings.bytes_per_token),
            last_resort=last_resort,
            failed_lately=FailedLately(loop.time),
            models=Models(settings.models, schedulers, last_resort, engines),
            loop=loop,
        )
        gateway = Gateway(shared, keys)
        try:
            async with answering(gateway, own, server.drain_s):
                yield Serving(port=own.getsockname()[1], gateway=gateway)
        finally:
            engines.close()
            await releases.flush(FLUSH_S)
            await schedulers.close()


@asynccontextmanager
async def answering(gateway: Gateway, own: socket.socket, drain_s: float) -> AsyncIterator[None]:
    """Let uvicorn speak HTTP on a socket while the block runs; signals are not its business."""
    config = uvicorn.Config(
        gateway,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(drain_s) + SETTLE_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config.load()
    http = uvicorn.Server(config)
    http.lifespan = config.lifespan_class(config)
    await http.startup(sockets=[own])
    ticking = asyncio.create_task(http.main_loop())
    try:
        yield
    finally:
        gateway.draining = True
        too_late = asyncio.get_running_loop().call_later(drain_s, gateway.cut_off)
        ticking.cancel()
        await http.shutdown(sockets=[own])
        too_late.cancel()


def listening(host: str, port: int) -> socket.socket:
    """Bind and listen; where that cannot be, say why in one line."""
    refuse_taken(host, port, "port")
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    own = socket.socket(family, kind, protocol)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    own.bind(address)
    own.setblocking(False)
    return own
