"""Sends spans to an OpenTelemetry collector: where to is a flag, or one of OpenTelemetry's own variables."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from services.logs import log_event
from services.settings import Option
from services.tracing.sampling import Sampling

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from services.tracing.spans import RequestTracer

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
INSTALL = "install the extra: pip install 'block-serving[otel]'"
FLUSH_S = 3.0  # for the last spans


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where traces go."""

    otlp_traces_endpoint: Annotated[
        str,
        Option(
            "OTLP endpoint that gets traces, such as http://localhost:4317; needs the extra `otel`.",
            metavar="URL",
            unset="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; nothing is traced without",
        ),
    ] = ""

    def __post_init__(self) -> None:
        """Refuse what is no URL."""
        if self.otlp_traces_endpoint:
            parts = urlsplit(self.otlp_traces_endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"otlp_traces_endpoint: must be a URL like http://localhost:4317, not {self.otlp_traces_endpoint!r}"
                )


@asynccontextmanager
async def traced(
    settings: TracingSettings, service: str, environment: Mapping[str, str] = os.environ
) -> AsyncIterator[RequestTracer | None]:
    """Trace while the block runs, if an endpoint is set; what has not been sent is sent at the end."""
    tracer = tracer_from(settings, service, environment)
    try:
        yield tracer
    finally:
        if tracer is not None and not await closed(tracer):
            log_event(log, logging.WARNING, "traces lost: the collector does not take them")


async def closed(tracer: RequestTracer) -> bool:
    """Send the last spans; False where that takes too long. A collector that hangs does not keep the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        tracer.close()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=close, daemon=True).start()
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), FLUSH_S)
    return done.is_set()


def tracer_from(settings: TracingSettings, service: str, environment: Mapping[str, str]) -> RequestTracer | None:
    """Return what traces requests; None where no endpoint is set, or tracing is switched off."""
    named = next((name for name in ENDPOINTS if environment.get(name)), "")
    if not (settings.otlp_traces_endpoint or named) or is_off(environment):
        return None
    sampling, protocol = Sampling.from_environment(environment), protocol_of(environment)
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        from services.tracing.spans import RequestTracer

        exporter = exporter_of(settings.otlp_traces_endpoint, protocol)
    except ImportError:
        if settings.otlp_traces_endpoint:
            raise ValueError(f"otlp_traces_endpoint: needs OpenTelemetry; {INSTALL}") from None
        log_event(log, logging.WARNING, f"nothing is traced, as OpenTelemetry is missing: {INSTALL}", variable=named)
        return None
    own = {} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: service}
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(own), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, sampling, random.random)


def exporter_of(endpoint: str, protocol: str) -> SpanExporter:
    """Make an exporter; without an endpoint it reads OpenTelemetry's variables itself."""
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint or None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

    return HttpSpanExporter(endpoint=endpoint or None)


def is_off(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables switch tracing off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return True
    return environment.get("OTEL_TRACES_EXPORTER") == "none"


def protocol_of(environment: Mapping[str, str]) -> str:
    """Return the protocol that OpenTelemetry's variables name."""
    name = next((name for name in PROTOCOLS if environment.get(name)), "")
    protocol = environment.get(name, GRPC)
    if protocol not in (GRPC, HTTP):
        raise ValueError(f"{name}: must be {GRPC} or {HTTP}, not {protocol!r}")
    return protocol
