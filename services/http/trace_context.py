"""The W3C trace context of a request: which trace it belongs to, and whether that trace is recorded."""

from __future__ import annotations

import re

from services.http.client import Headers

TRACEPARENT = b"traceparent"
_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?")
_NO_TRACE = b"0" * 32
_SAMPLED = 1


def sampled_trace_id(headers: Headers) -> str:
    """Return the id of the trace that records a request; empty where none does."""
    for name, value in headers:
        if name == TRACEPARENT:
            parts = _PARENT.fullmatch(value.strip())
            if parts is not None and parts[1] != _NO_TRACE and int(parts[2], 16) & _SAMPLED:
                return parts[1].decode()
    return ""
