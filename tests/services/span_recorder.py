"""A tracer that keeps spans in memory. It needs the extra `otel`: skip a test without it before importing this."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.tracing.sampling import Sampling
from services.tracing.spans import RequestTracer
from tests.services.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # of a client
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class SpanRecorder:
    """The spans of requests that have ended."""

    def __init__(self, share: float = 1.0) -> None:
        """Record a share of the requests, drawn as 0.5."""
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RequestTracer(provider, Sampling(share=share), lambda: 0.5)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order of their starts."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    async def tree(self, root: str) -> dict[str, Any]:
        """Wait until a span without a parent here has ended; the tree of names below it."""
        await until(lambda: any(span.name == root for span in self.spans))

        def below(span: ReadableSpan) -> dict[str, Any]:
            children = [one for one in self.spans if one.parent and one.parent.span_id == span.context.span_id]
            return {one.name: below(one) for one in children}

        return {root: below(self.named(root))}

    async def children(self, root: str) -> list[ReadableSpan]:
        """Wait until a span has ended; those below it, in the order of their starts."""
        await until(lambda: any(span.name == root for span in self.spans))
        above = self.named(root).context.span_id
        return [span for span in self.spans if span.parent and span.parent.span_id == above]

    def named(self, name: str) -> ReadableSpan:
        """The only span of a name."""
        (found,) = (span for span in self.spans if span.name == name)
        return found


def id_of(span: ReadableSpan) -> str:
    """The id of a span as headers have it."""
    return f"{span.context.span_id:016x}"


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """The attributes of a span."""
    return dict(span.attributes or {})
