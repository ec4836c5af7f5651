"""Spans of recorded requests. This module imports OpenTelemetry; `services.tracing.otlp` does so where it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from services.http.trace_context import TraceParent
from services.tracing.sampling import Sampling

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]  # None is left out

NAME = "block"
NANOSECONDS = 1e9
ERROR_TYPE = "error.type"


class RequestTracer:
    """Starts a trace for each request that is sampled; for others there is no span at all."""

    def __init__(self, provider: TracerProvider, sampling: Sampling, random: Callable[[], float]) -> None:
        """Record by a provider, whose own sampler has to take every span."""
        self._provider, self._sampling, self._random = provider, sampling, random
        self._tracer = provider.get_tracer(NAME)

    def begin(
        self, name: str, parent: TraceParent | None, attributes: Attributes, started_unix_s: float
    ) -> ActiveSpan | None:
        """Start the span of a request that this process serves; None where the request is not sampled."""
        if not self._sampling.takes(parent, self._random()):
            return None
        span = self._tracer.start_span(
            name,
            context=Context() if parent is None else context_of(parent),
            kind=SpanKind.SERVER,
            attributes=given(attributes),
            start_time=round(started_unix_s * NANOSECONDS),
        )
        return ActiveSpan(self._tracer, span)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


class ActiveSpan:
    """A span that has started, and the spans below it."""

    __slots__ = ("_has_ended", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        """Take a span that has just started."""
        self._tracer, self._span = tracer, span
        self._has_ended = False

    @property
    def parent(self) -> TraceParent:
        """The span as the parent of what another server does."""
        context = self._span.get_span_context()
        return TraceParent(trace_id=f"{context.trace_id:032x}", span_id=f"{context.span_id:016x}", is_sampled=True)

    @property
    def trace_id(self) -> str:
        """The id of the trace."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def child(self, name: str, attributes: Attributes, *, calls: bool = False) -> ActiveSpan:
        """Start a span below this one; `calls`: what it covers is done by another server."""
        kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, context=set_span_in_context(self._span, Context()), kind=kind, attributes=given(attributes)
        )
        return ActiveSpan(self._tracer, span)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(given(attributes))

    def end(self, error: str = "") -> None:
        """End the span, with the kind of its error if there was one; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def context_of(parent: TraceParent) -> Context:
    """Return a context in which a span of another process is the parent."""
    remote = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def given(attributes: Attributes) -> dict[str, Value]:
    """Leave out what is not known."""
    return {name: value for name, value in attributes.items() if value is not None}
