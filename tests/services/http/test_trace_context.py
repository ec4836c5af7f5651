"""Reading W3C trace contexts."""

from __future__ import annotations

import pytest

from services.http.trace_context import sampled_trace_id

TRACE = b"0af7651916cd43dd8448eb211c80319c"
SPAN = b"b7ad6b7169203331"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"00-" + TRACE + b"-" + SPAN + b"-01", TRACE.decode()),
        (b"cc-" + TRACE + b"-" + SPAN + b"-03-what-comes-later", TRACE.decode()),
        (b"00-" + TRACE + b"-" + SPAN + b"-00", ""),
        (b"00-" + b"0" * 32 + b"-" + SPAN + b"-01", ""),
        (b"00-" + TRACE.upper() + b"-" + SPAN + b"-01", ""),
        (b"", ""),
        (b"\xff" * 60, ""),
    ],
)
def test_only_sampled_traces_are_named(value: bytes, expected: str) -> None:
    """A trace that is not recorded, and a header that is none, give no id."""
    assert sampled_trace_id([(b"host", b"here"), (b"traceparent", value)]) == expected


def test_no_header_no_trace() -> None:
    """Most requests have no trace."""
    assert sampled_trace_id([(b"host", b"here")]) == ""
