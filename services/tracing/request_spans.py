"""The spans of one request: its own, that of each decision, and one for each leg that an engine serves."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2
from services.http.errors import HttpError
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest
from services.http.origin import Origin
from services.http.prefill_leg import HELD, NO_BLOCKS
from services.http.trace_context import TRACEPARENT, sampled_trace_id, trace_parent_of, unsampled
from services.tracing.attributes import (
    Found,
    decision_attributes,
    outcome_attributes,
    request_attributes,
)

if TYPE_CHECKING:
    from scheduler.placement import Placement
    from services.tracing.spans import ActiveSpan, RequestTracer

SCHEDULE = "block.schedule"
STATUS = "http.response.status_code"
MIGRATIONS = "block.migrations"
SERVE, PREFILL, DECODE = "serve", "prefill", "decode"  # legs


class RequestSpans:
    """Starts and ends the spans of a request; without a tracer, and where it is not sampled, there are none."""

    __slots__ = ("_own", "_unsampled", "trace_id")

    def __init__(
        self,
        tracer: RequestTracer | None,
        headers: Headers,
        openai: OpenAIRequest,
        request: common_pb2.Request,
        arrived_unix_s: float,
    ) -> None:
        """Start the request's own span, below the one that the client's headers name; not if it is not sampled."""
        self._own: ActiveSpan | None = None
        self._unsampled = b""  # what engines get in place of the client's header
        self.trace_id = ""  # of the trace that records the request, if any does
        if tracer is None:
            self.trace_id = sampled_trace_id(headers)
            return
        parent = trace_parent_of(headers)
        self._own = tracer.begin(
            f"{openai.operation} {openai.model}".rstrip(),
            parent,
            request_attributes(openai, request),
            arrived_unix_s,
        )
        if self._own is None:
            self._unsampled = unsampled(parent)
        else:
            self.trace_id = self._own.trace_id

    @property
    def is_recorded(self) -> bool:
        """Return whether there are spans."""
        return self._own is not None

    def set(self, found: Found) -> None:
        """Add attributes to the request's own span."""
        if self._own is not None:
            self._own.set(found)

    def ended(self, outcome: common_pb2.Outcome) -> None:
        """Note how the request ended; the last attempt counts."""
        if self._own is not None:
            self._own.set(outcome_attributes(outcome))

    def end(self, error: str = "") -> None:
        """End the request's own span; only the first call counts."""
        if self._own is not None:
            self._own.end(error)

    # Decisions.

    def scheduling(self) -> ActiveSpan | None:
        """Start the span of a decision."""
        return None if self._own is None else self._own.child(SCHEDULE, {})

    async def scheduled(
        self, placing: Awaitable[tuple[Placement, common_pb2.Decision]]
    ) -> tuple[Placement, common_pb2.Decision]:
        """Record a decision while it is made in this process."""
        span = self.scheduling()
        if span is None:
            return await placing
        try:
            placement, decision = await placing
        except BaseException as error:
            span.end(error_name(error))
            raise
        span.set(decision_attributes(decision))
        span.end()
        return placement, decision

    # Legs.

    def leg(self, name: str, origin: Origin, *, instance_id: str, policy: str) -> ActiveSpan | None:
        """Start the span of a leg: `prefill`, `decode`, or `serve` for a whole request."""
        if self._own is None:
            return None
        return self._own.child(
            f"block.{name}",
            {
                "server.address": origin.host,
                "server.port": origin.port,
                "block.instance": instance_id,
                "block.policy": policy,
            },
            calls=True,
        )

    def headers_from(self, headers: Headers) -> Headers:
        """Return a client's headers for engines; each leg of a recorded request adds its span to them."""
        if self._own is None and not self._unsampled:
            return headers
        passed = [pair for pair in headers if pair[0] != TRACEPARENT]
        if self._unsampled:
            passed.append((TRACEPARENT, self._unsampled))
        return passed

    def headers_below(self, leg: ActiveSpan | None, headers: Headers) -> Headers:
        """Return the headers for an engine, whose own span is below that of the leg."""
        return headers if leg is None else [*headers, (TRACEPARENT, leg.parent.header())]


def end_prefill(span: ActiveSpan | None, result: str) -> None:
    """End the span of a prefill leg, by the result that metrics name."""
    if span is not None:
        span.set({"block.result": result})
        span.end("" if result in (HELD, NO_BLOCKS) else result)


def error_name(error: BaseException) -> str:
    """Name an error as spans do: by the status that the client gets, else by its type."""
    return str(error.status) if isinstance(error, HttpError) else type(error).__name__
