"""The mirror of an engine that exports no state: its clock and log, its proxy, and the scraping of its metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from predictor.config import EngineConfig
from predictor.editable_engine import ShownRecords
from predictor.engine_view import EndedRequest, EngineView
from predictor.kv_events.stream import KvEventStream
from predictor.mirror.engine_kinds import GENERIC, SGLANG, VLLM
from predictor.mirror.events import (
    AdaptersRead,
    EngineRestarted,
    MetricsScraped,
    MirrorEvent,
    MirrorReport,
    MirrorStarted,
    ModelLengthRead,
    RequestShown,
    UnknownRequestsChanged,
    VersionRead,
)
from predictor.mirror.mirror import EngineMirror, InconsistentModelError, NoModelError
from predictor.mirror.models import MirrorOptions
from predictor.mirror.scraped_metrics import parse_adapters, parse_max_model_len, parse_metrics, parse_version
from predictor.mirror.sglang_metrics import parse_sglang_metrics
from predictor.profile import Profile
from predictor.request_group import Placeable
from predictor.reserved_requests import ReportedLengths
from predictor.snapshot import Snapshot
from predictor.vllm_versions import release_of, rules_for
from protos.block.v1 import common_pb2
from services.engine_state import layout
from services.http.client import HttpClient
from services.http.engine_client import engine_client
from services.http.origin import Origin, origin_of
from services.http.server import answering, listening
from services.kv_events.metrics import KvEventCollectors, KvEventMetrics
from services.kv_events.subscriber import stream_of, subscribed
from services.logs import log_event
from services.predictor_server.engine_identification import identify
from services.predictor_server.engine_source import DownError
from services.predictor_server.metrics import MirrorMetrics
from services.predictor_server.proxy import Proxy
from services.predictor_server.settings import MirrorSettings, SidecarSettings
from services.security.certificates import certificates_of
from services.supervised_task import supervised

if TYPE_CHECKING:
    from services.observing.traffic import TrafficObservation

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 5.0
MODELS_S = 10.0  # after which the engine is asked again what it lists
MAX_METRICS_BYTES = 16 * 2**20
LOOK_S = 30.0  # between two looks whether an engine of unknown kind has become another one
RECORDS = ShownRecords(live=layout.LIVE, facts=layout.REQUEST)


class MirroredEngine:
    """An engine source that stamps events with the clock, and logs the mirror's reports."""

    kind = common_pb2.STATE_SOURCE_MIRRORED

    def __init__(
        self,
        settings: MirrorSettings,
        profile: Profile,
        residual: str,
        forget_s: float,
        kv_events: KvEventStream | None = None,
    ) -> None:
        """Start without any knowledge of the engine but the given settings, and its KV events."""
        self.lengths = ReportedLengths()
        self.observation: TrafficObservation | None = None  # that gets the events as well, while there is one
        self.config: EngineConfig | None = None  # once it is known
        self.speed = settings.speed
        options = MirrorOptions(
            profile=profile,
            records=RECORDS,
            engine=settings.engine,
            residual=residual,
            speed=settings.speed,
            forget_s=forget_s,
            max_requests=settings.max_concurrency,
            engine_kind=settings.engine_kind,
        )
        self._profile = profile.name
        self.kv_events = kv_events
        self._mirror = EngineMirror(options, self.lengths, time.monotonic(), kv_events)
        self._shown: list[str] = []
        self._ended: list[EndedRequest] = []

    @property
    def num_unknown(self) -> int:
        """Return how many requests bypass the proxy."""
        return self._mirror.num_unknown

    @property
    def reads_tokens(self) -> bool:
        """Whether the tokens of prompts are of use."""
        return self.kv_events is not None

    def record(self, event: MirrorEvent) -> None:
        """Take an event that happens now."""
        self._mirror.record(event, time.monotonic())
        if self.observation is not None:
            self.observation.record(event)

    def refresh(self) -> EngineView:
        """Return the engine's state now; DownError where it is not known."""
        with self._reporting():
            return self._mirror.view(time.monotonic())

    def snapshot(self) -> Snapshot:
        """Return the engine's state as a snapshot; its times are on a clock of the mirror's own."""
        with self._reporting():
            return self._mirror.snapshot(time.monotonic())

    def reserve(self, request: Placeable) -> None:
        """Add a request to the view that has not arrived yet; ValueError where the engine could never serve it."""
        with self._reporting():
            self._mirror.reserve(request, time.monotonic())

    def release(self, request_id: str) -> None:
        """Remove a reserved request from the view."""
        self._mirror.release(request_id)

    def take_shown(self) -> Sequence[str]:
        """Return the ids of requests that reached the engine since this was last called."""
        shown, self._shown = self._shown, []
        return shown

    def take_ended(self) -> Sequence[EndedRequest]:
        """Return the requests that ended since this was last called."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Drop all events."""
        self._mirror.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Log and keep the mirror's reports; an engine without a model is starting."""
        try:
            yield
        except InconsistentModelError as error:
            log_event(log, logging.WARNING, "mirror is reset: its model is inconsistent", reason=str(error))
            message = f"the mirror's model is inconsistent: {error}"
            raise DownError(message, common_pb2.INSTANCE_STATE_STARTING) from None
        except NoModelError as error:
            raise DownError(str(error), common_pb2.INSTANCE_STATE_STARTING) from None
        finally:
            for report in self._mirror.take_reports():
                self._handle(report)

    def _handle(self, report: MirrorReport) -> None:
        match report:
            case RequestShown():
                self._shown.append(report.request_id)
            case EndedRequest():
                self._ended.append(report)
            case MirrorStarted(config=config, is_update=is_update):
                self.config = config
                log_event(
                    log, logging.DEBUG if is_update else logging.INFO, "engine is mirrored from its traffic",
                    profile=self._profile,
                    num_gpu_blocks=config.num_gpu_blocks, block_size=config.block_size,
                    max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=config.max_model_len, version=config.vllm_version,
                    rules=rules_for(config.vllm_version).name,
                )  # fmt: skip
            case EngineRestarted(num_requests=num_requests):
                log_event(log, logging.WARNING, "engine restarted", requests=num_requests)
            case UnknownRequestsChanged(before=before, now=now):
                if now and not before:
                    log_event(log, logging.WARNING, "requests bypass the proxy", requests=now)
                elif before and not now:
                    log_event(log, logging.INFO, "requests no longer bypass the proxy", requests=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMirror:
    """A mirrored engine, and the proxy for its clients."""

    source: MirroredEngine
    proxy: Proxy
    port: int


@asynccontextmanager
async def mirroring(
    sidecar: SidecarSettings, profile: Profile, registry: CollectorRegistry
) -> AsyncIterator[RunningMirror]:
    """Serve as a proxy before an engine, and mirror it, while the block runs."""
    settings = sidecar.mirror
    if settings is None:
        raise ValueError("mirror: is missing")
    origin = origin_of(settings.engine_url)
    stream = stream_of(settings.kv_events) if settings.kv_events.endpoint else None
    source = MirroredEngine(settings, profile, sidecar.residual, sidecar.forget_s, stream)
    metrics = MirrorMetrics(registry, sidecar.instance_id, lambda: source.num_unknown)
    proxy = Proxy(settings, origin, source, metrics.count_reply, registry)
    tls = certificates_of(settings.tls).server_context if settings.proxy_tls else None
    with listening(settings.host, settings.port, "proxy_port") as own:
        port = own.getsockname()[1]
        scraping = asyncio.create_task(supervised("scraping metrics", partial(_scrape, settings, origin, source)))
        try:
            async with AsyncExitStack() as parts:
                if stream is not None:
                    counts = KvEventMetrics(KvEventCollectors(registry), sidecar.instance_id, stream)
                    await parts.enter_async_context(subscribed(settings.kv_events, stream, counts))
                await parts.enter_async_context(answering(proxy, own, settings.drain_s, tls=tls))
                log_event(log, logging.INFO, "proxying", engine_url=settings.engine_url, host=settings.host, port=port)
                yield RunningMirror(source=source, proxy=proxy, port=port)
        finally:
            scraping.cancel()
            with suppress(asyncio.CancelledError):
                await scraping
            proxy.close()
            source.close()


async def _scrape(settings: MirrorSettings, origin: Origin, source: MirroredEngine) -> None:
    """Scrape the engine's /metrics at every interval; what it lists, and its version, now and then."""
    client = engine_client()
    could_scrape, has_length = True, False
    kind = settings.engine_kind if settings.engine_kind == VLLM else ""
    next_look_s = read_again_s = 0.0
    try:
        while True:
            try:
                if not kind or (kind == GENERIC and time.monotonic() >= next_look_s):
                    kind, next_look_s = (
                        await _identify(client, origin, source, settings, kind),
                        time.monotonic() + LOOK_S,
                    )
                if not has_length or time.monotonic() >= read_again_s:
                    await _read_models(client, origin, source)
                    await _read_version(client, origin, source)
                    has_length, read_again_s = True, time.monotonic() + MODELS_S
                reason = ""
                if kind != GENERIC:
                    parse = parse_sglang_metrics if kind == SGLANG else parse_metrics
                    status, body = await client.get(
                        origin, b"/metrics", within_s=SCRAPE_TIMEOUT_S, max_bytes=MAX_METRICS_BYTES
                    )
                    if status == 200:
                        source.record(MetricsScraped(metrics=parse(body.decode(errors="replace"))))
                    else:
                        reason, has_length = f"its /metrics returns {status}", False
            except (OSError, TimeoutError, ValueError) as error:
                reason, has_length = str(error) or type(error).__name__, False
                kind = settings.engine_kind if settings.engine_kind == VLLM else ""  # another engine may come back
            if reason and could_scrape:
                log_event(log, logging.WARNING, "engine's metrics cannot be scraped", reason=reason)
            elif not reason and not could_scrape:
                log_event(log, logging.INFO, "engine's metrics are scraped again")
            could_scrape = not reason
            await asyncio.sleep(settings.metrics_s)
    finally:
        client.close()


async def _identify(
    client: HttpClient, origin: Origin, source: MirroredEngine, settings: MirrorSettings, before: str
) -> str:
    """Find out the engine's kind, and report it to the mirror where it is new."""
    event = await identify(client, origin, settings.engine_kind)
    if event.kind != before:
        source.record(event)
        log_event(
            log, logging.INFO, "engine is identified", kind=event.kind, approximated="; ".join(event.approximations)
        )
    return event.kind


async def _read_models(client: HttpClient, origin: Origin, source: MirroredEngine) -> None:
    """Read the length of the model, and the LoRA adapters, which may have been loaded since."""
    status, body = await client.get(origin, b"/v1/models", within_s=SCRAPE_TIMEOUT_S)
    if status != 200:
        return
    if (length := parse_max_model_len(body)) is not None:
        source.record(ModelLengthRead(max_model_len=length))
    source.record(AdaptersRead(adapters=parse_adapters(body)))


async def _read_version(client: HttpClient, origin: Origin, source: MirroredEngine) -> None:
    """Read vLLM's version; engines that have none, or another kind of one, keep the configured rules."""
    status, body = await client.get(origin, b"/version", within_s=SCRAPE_TIMEOUT_S)
    if status == 200 and (version := parse_version(body)):
        try:
            release_of(version)
        except ValueError as error:
            log_event(log, logging.WARNING, "engine's version is not understood", reason=str(error))
        else:
            source.record(VersionRead(version=version))
