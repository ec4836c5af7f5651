"""The test mode: headers by which the conformance tests of the Gateway API direct a picker, and see what it did."""

from __future__ import annotations

from services.http.headers import Headers

SELECTION = b"test-epp-endpoint-selection"
PREFIX = b"x-conformance-test-"


def entries_of(value: bytes) -> list[str]:
    """Read the endpoints that a test asks for; an address stands for all its ports."""
    return [entry for part in value.decode("latin-1").split(",") if (entry := part.strip())]


def response_headers(pool: str, selected: str, served: str | None) -> Headers:
    """Write what a test wants to know: the endpoints that were chosen, the one that served, and the pool."""
    if served is None:
        served = "fail: missing envoy lb metadata"
    elif not served:
        served = "fail: missing destination endpoint served metadata"
    return [
        (b"x-went-into-resp-headers", b"true"),
        (PREFIX + b"served-endpoint", served.encode()),
        (PREFIX + b"selected-endpoint", selected.encode()),
        (PREFIX + b"epp-pool", pool.encode()),
    ]
