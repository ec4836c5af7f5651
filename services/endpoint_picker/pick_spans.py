"""The spans of a request at the picker: its own, that of the decision, and that of the leg that the proxy sends."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest
from services.http.origin import origin_of
from services.http.proxying import OK, SERVER_ERROR
from services.http.reply_format import CANCELLED, FAILED
from services.http.trace_context import TRACEPARENT
from services.tracing.request_spans import DECODE, SERVE, STATUS, RequestSpans

if TYPE_CHECKING:
    from scheduler.placement import Placement
    from services.tracing.spans import ActiveSpan, RequestTracer

CLIENT_LEFT, BROKEN = "client_left", "failed"


class PickSpans:
    """Starts and ends the spans of one request; without a tracer, and where it is not sampled, there are none."""

    __slots__ = ("_client", "_leg", "_request")

    def __init__(
        self,
        tracer: RequestTracer | None,
        headers: Headers,
        openai: OpenAIRequest,
        request: common_pb2.Request,
    ) -> None:
        """Start the span of a request, below that of the proxy or of its client."""
        self._client = [pair for pair in headers if pair[0] == TRACEPARENT]
        self._request = RequestSpans(tracer, headers, openai, request, request.arrival_unix_s)
        self._leg: ActiveSpan | None = None

    async def scheduled(
        self, placing: Awaitable[tuple[Placement, common_pb2.Decision]]
    ) -> tuple[Placement, common_pb2.Decision]:
        """Record a decision while it is made."""
        return await self._request.scheduled(placing)

    def refused(self, status: int) -> None:
        """End the span of a request that the picker answers itself; 0: its client has left."""
        self._request.set({STATUS: status or None})
        self._request.end("" if 0 < status < SERVER_ERROR else str(status or CLIENT_LEFT))

    def chosen(self, decision: common_pb2.Decision) -> Headers:
        """Start the span of the leg; return the headers that make the engine's own span one below it."""
        if self._request.is_recorded:
            self._leg = self._request.leg(
                DECODE if decision.HasField("prefill") else SERVE,
                origin_of(decision.instance.engine_url),
                instance_id=decision.instance.instance_id,
                policy=decision.policy,
            )
        passed = self._request.headers_below(self._leg, self._request.headers_from(self._client))
        return [pair for pair in passed if pair not in self._client]

    def served_by(self, instance_id: str | None) -> None:
        """Note that the proxy sent the request to another instance than the chosen one; None: to an unknown one."""
        if self._leg is not None:
            self._leg.set({"block.instance": instance_id or "unknown", "block.served_elsewhere": True})

    def ended(self, status: int, outcome: common_pb2.Outcome | None) -> None:
        """End all spans with the response, whose outcome may be unknown; only the first call counts."""
        if not self._request.is_recorded:
            return
        error = str(status) if status >= SERVER_ERROR else ""
        broken = ""
        if outcome is not None:
            self._request.ended(outcome)
            if outcome.finish_reason == CANCELLED:
                error = CLIENT_LEFT
            elif outcome.finish_reason == FAILED:
                broken = BROKEN
        if self._leg is not None:
            self._leg.set({STATUS: status or None})
            self._leg.end(error or broken)
        self._request.set({STATUS: status or None})
        self._request.end(error or (broken if status == OK else ""))
