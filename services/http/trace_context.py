"""The W3C trace context of a request: which trace it belongs to, and whether that trace is recorded."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from services.http.headers import Headers

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_NO_VERSION, _NO_TRACE, _NO_SPAN = b"ff", b"0" * 32, b"0" * 16
_SAMPLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceParent:
    """The span that a request comes from."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def header(self) -> bytes:
        """Write the value of the header `traceparent`."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}".encode()


def trace_parent_from(value: bytes) -> TraceParent | None:
    """Read a header `traceparent`; None where it is none."""
    parts = _FORM.fullmatch(value.strip())
    if parts is None or parts[1] == _NO_VERSION or parts[2] == _NO_TRACE or parts[3] == _NO_SPAN:
        return None
    return TraceParent(
        trace_id=parts[2].decode(), span_id=parts[3].decode(), is_sampled=bool(int(parts[4], 16) & _SAMPLED)
    )


def trace_parent_of(headers: Headers) -> TraceParent | None:
    """Return the span that a request comes from, if its headers name one."""
    for name, value in headers:
        if name == TRACEPARENT:
            return trace_parent_from(value)
    return None


def sampled_trace_id(headers: Headers) -> str:
    """Return the id of the trace that records a request; empty where none does."""
    parent = trace_parent_of(headers)
    return parent.trace_id if parent is not None and parent.is_sampled else ""


def unsampled(parent: TraceParent | None) -> bytes:
    """Write a header for a request that is not recorded, so that the next server does not record it either."""
    if parent is None:
        return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00".encode()
    return TraceParent(trace_id=parent.trace_id, span_id=parent.span_id, is_sampled=False).header()
