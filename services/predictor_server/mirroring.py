"""A mirrored engine with all that keeps it true: the proxy before the engine, and a reader of the engine's totals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from predictor.mirror.engine_totals import model_length_from, totals_from
from predictor.profile import Profile
from services.http.client import HttpClient, Origin, origin_of
from services.http.server import answering, listening
from services.logs import log_event
from services.predictor_server.metrics import MirrorMetrics
from services.predictor_server.mirror import MirroredEngine
from services.predictor_server.proxy import Proxy
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.supervised_task import supervised

log = logging.getLogger(__name__)

WITHIN_S = 5.0
MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirroring:
    """A mirrored engine, and where its clients reach it."""

    source: MirroredEngine
    proxy: Proxy
    port: int


@asynccontextmanager
async def mirroring(
    sidecar: SidecarSettings, profile: Profile, registry: CollectorRegistry
) -> AsyncIterator[Mirroring]:
    """Stand between an engine and its clients while the block runs."""
    settings = sidecar.mirror
    if settings is None:
        raise ValueError("mirror: is missing")
    origin = origin_of(settings.engine_url)
    source = MirroredEngine(settings, profile, sidecar.residual, sidecar.forget_s)
    measures = MirrorMetrics(registry, sidecar.instance_id, source)
    proxy = Proxy(settings, origin, source, measures.answered)
    with listening(settings.host, settings.port, "proxy_port") as own:
        port = own.getsockname()[1]
        reading = asyncio.create_task(supervised("reading metrics", partial(_keep_reading, settings, origin, source)))
        try:
            async with answering(proxy, own, settings.drain_s):
                log_event(log, logging.INFO, "proxying", engine_url=settings.engine_url, host=settings.host, port=port)
                yield Mirroring(source=source, proxy=proxy, port=port)
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            proxy.close()
            source.close()


async def _keep_reading(settings: MirrorSettings, origin: Origin, source: MirroredEngine) -> None:
    """Read what the engine tells of itself, its longest request once in each of its lives."""
    client = HttpClient()
    was_read, is_known = True, False
    try:
        while True:
            try:
                if not is_known:
                    is_known = await _read_length(client, origin, source)
                status, body = await client.get(origin, b"/metrics", within_s=WITHIN_S, max_bytes=MOST_BYTES)
                if status != 200:
                    raise ConnectionError(f"its /metrics says {status}")
                source.read(totals_from(body.decode(errors="replace")))
                complaint = ""
            except (OSError, TimeoutError, ValueError) as error:
                complaint, is_known = str(error) or type(error).__name__, False
            if bool(complaint) == was_read:
                was_read = not complaint
                level = logging.WARNING if complaint else logging.INFO
                log_event(log, level, "engine's metrics cannot be read" if complaint else "engine's metrics are read",
                    reason=complaint or "well again")  # fmt: skip
            await asyncio.sleep(settings.metrics_s)
    finally:
        client.close()


async def _read_length(client: HttpClient, origin: Origin, source: MirroredEngine) -> bool:
    """Ask how long requests may be; tell whether there was an answer."""
    status, body = await client.get(origin, b"/v1/models", within_s=WITHIN_S)
    if status == 200 and (length := model_length_from(body)) is not None:
        source.model_length(length)
    return True
