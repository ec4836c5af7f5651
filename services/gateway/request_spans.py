"""The spans of a request at the gateway: its own, that of each decision, and one for each leg sent to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2
from services.gateway.destinations import Destination
from services.http.application import Call, ClientLeftError
from services.http.client import Headers
from services.http.errors import HttpError
from services.http.openai_body import OpenAIRequest
from services.http.trace_context import TRACEPARENT, sampled_trace_id, trace_parent_of, unsampled
from services.tracing.attributes import (
    decision_attributes,
    outcome_attributes,
    request_attributes,
)

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan, RequestTracer

SCHEDULE = "block.schedule"
STATUS = "http.response.status_code"
CLIENT_LEFT, CANCELLED = "client_left", "cancelled"


class RequestSpans:
    """The spans of one request; without a tracer, and where the request is not sampled, there are none."""

    __slots__ = ("_own", "_unsampled", "trace_id")

    def __init__(
        self, tracer: RequestTracer | None, call: Call, openai: OpenAIRequest, request: common_pb2.Request
    ) -> None:
        """Start the request's own span, unless it is not sampled."""
        self._own: ActiveSpan | None = None
        self._unsampled = b""  # what engines get in place of the client's header
        self.trace_id = ""  # of the trace that records the request, if any does
        if tracer is None:
            self.trace_id = sampled_trace_id(call.headers)
            return
        parent = trace_parent_of(call.headers)
        self._own = tracer.begin(
            f"{openai.operation} {openai.model}".rstrip(),
            parent,
            request_attributes(openai, request),
            call.arrived_unix_s,
        )
        if self._own is None:
            self._unsampled = unsampled(parent)
        else:
            self.trace_id = self._own.trace_id

    @contextmanager
    def recorded(self, call: Call) -> Iterator[None]:
        """End the request's own span with the block, by how the block ends."""
        own, status, error = self._own, 0, ""
        if own is None:
            yield
            return
        try:
            yield
        except HttpError as refused:
            status = refused.status
            raise
        except ClientLeftError:
            error = CLIENT_LEFT
            raise
        except asyncio.CancelledError:
            error = CANCELLED
            raise
        except Exception as defect:
            error = type(defect).__name__
            raise
        finally:
            status = call.status or status
            own.set({STATUS: status or None})
            own.end(error or (str(status) if status >= 500 else ""))

    def scheduling(self) -> ActiveSpan | None:
        """Start the span of a decision."""
        return None if self._own is None else self._own.child(SCHEDULE, {})

    def leg(self, name: str, destination: Destination) -> ActiveSpan | None:
        """Start the span of a leg: `prefill`, `decode`, or `serve` for a whole request."""
        if self._own is None:
            return None
        origin = destination.origin
        return self._own.child(
            f"block.{name}",
            {
                "server.address": origin.host,
                "server.port": origin.port,
                "block.instance": destination.instance_id,
                "block.policy": destination.policy,
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

    def ended(self, outcome: common_pb2.Outcome) -> None:
        """Note how the request ended; the last attempt counts."""
        if self._own is not None:
            self._own.set(outcome_attributes(outcome))


def end_scheduling(span: ActiveSpan, destination: Destination | None, error: BaseException | None) -> None:
    """End the span of a decision, or of one that failed."""
    if destination is not None:
        found = {"block.instance": destination.instance_id, "block.policy": destination.policy}
        span.set(found if destination.decision is None else decision_attributes(destination.decision))
    status = error.status if isinstance(error, HttpError) else None
    name = "" if error is None else type(error).__name__ if status is None else str(status)
    span.end(name)
