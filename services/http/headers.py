"""The headers of a request that are between its client and us, and those that are the engine's to read."""

from __future__ import annotations

from services.http.client import Headers

REQUEST_ID = b"x-request-id"
CONNECTION = b"connection"

# What is said to us, and not to the engine; and of its reply, what is ours to say.
HOP_BY_HOP = frozenset(
    (b"host", CONNECTION, b"content-length", b"transfer-encoding", b"keep-alive", b"te", b"trailer", b"upgrade",
     b"expect", b"proxy-connection", b"proxy-authorization")
)  # fmt: skip
KEPT_CONNECTIONS = (b"keep-alive", b"close")


def without_hops(headers: Headers, more: frozenset[bytes] = frozenset()) -> Headers:
    """Leave out what is between the client and us, what `connection` names too, and `more`."""
    passed = [pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in more]
    for name, value in headers:
        if name == CONNECTION and value.lower() not in KEPT_CONNECTIONS:
            named = {word.strip().lower() for word in value.split(b",")}
            passed = [pair for pair in passed if pair[0] not in named]
    return passed
