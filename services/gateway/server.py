"""The gateway as a process: uvicorn on uvloop, a socket of its own, and an end that lets streams finish."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop
from prometheus_client import CollectorRegistry

from services.gateway.app import Gateway
from services.gateway.context import GatewayContext
from services.gateway.destinations import Fallback, OutlierDetection
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.release_queue import ReleaseQueue
from services.gateway.retry_budget import RetryBudget
from services.gateway.schedulers import Schedulers
from services.gateway.settings import GatewaySettings
from services.http.client import HttpClient
from services.http.prompt_sizes import PromptSizes
from services.http.prompt_tokens import PromptTokens
from services.http.server import answering, listening
from services.logs import log_event
from services.rpc.server import metrics_served, stop_signal
from services.rpc.settings import ServerSettings

log = logging.getLogger(__name__)

NAME = "gateway"
FLUSH_S = 5.0  # for the last releases


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
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
        log_event(log, logging.INFO, "serving", server=NAME, host=server.host, port=here.port)
        await stop.wait()
        log_event(log, logging.INFO, "draining", server=NAME, requests=len(here.gateway))
    log_event(log, logging.INFO, "stopped", server=NAME)


@asynccontextmanager
async def serving(settings: GatewaySettings, server: ServerSettings, keys: ApiKeys) -> AsyncIterator[RunningGateway]:
    """Serve while the block runs; then take nothing new, and let what is under way end, `drain_s` at most."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    sizes = PromptSizes(settings.bytes_per_token)
    prompts = PromptTokens(
        sizes,
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
        block_tokens=settings.block_tokens,
        seed=settings.hash_seed,
    )
    with listening(server.host, server.port) as own, metrics_served(server, registry):
        schedulers = Schedulers(settings.schedulers, within_s=settings.schedule_s, failures=metrics.scheduler_failures)
        releases = ReleaseQueue(
            schedulers.release, most=settings.releases_kept, told=metrics.released, lost=metrics.lost
        )
        engines = HttpClient(connect_s=settings.connect_s)
        loop = asyncio.get_running_loop()
        last_resort = Fallback(settings.engine_urls, loop.time)
        shared = GatewayContext(
            settings=settings,
            metrics=metrics,
            schedulers=schedulers,
            engines=engines,
            releases=releases,
            budget=RetryBudget(most=settings.max_concurrency, per_request=settings.retry_ratio),
            sizes=sizes,
            prompts=prompts,
            last_resort=last_resort,
            failed_lately=OutlierDetection(loop.time),
            models=Models(settings.models, schedulers, last_resort, engines),
            loop=loop,
        )
        gateway = Gateway(shared, keys)
        try:
            async with answering(gateway, own, server.drain_s):
                yield RunningGateway(port=own.getsockname()[1], gateway=gateway)
        finally:
            engines.close()
            await releases.flush(FLUSH_S)
            await schedulers.close()
