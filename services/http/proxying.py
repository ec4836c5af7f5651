"""What our proxies in front of engines share: the headers that they pass on, and errors of engines."""

from __future__ import annotations

from services.http.connection import ConnectError
from services.http.errors import ApiError
from services.http.headers import Headers

CONNECTION = b"connection"
CONTENT_TYPE = b"content-type"
EVENT_STREAM = b"text/event-stream"

# Headers of one connection (RFC 9110, 7.6.1); a proxy sets its own.
HOP_BY_HOP = frozenset(
    (b"host", CONNECTION, b"content-length", b"transfer-encoding", b"keep-alive", b"te", b"trailer", b"upgrade",
     b"expect", b"proxy-connection", b"proxy-authorization")
)  # fmt: skip
# Headers of an engine's reply that a gateway sets itself.
OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
     b"upgrade", b"trailer", b"te", b"proxy-connection")
)  # fmt: skip
OK, SERVER_ERROR = 200, 500
RETRIED = (429, SERVER_ERROR, 502, 503, 504)  # statuses of an engine that another engine may not return
NOT_SERVING = (502, 503, 504)  # of them, those of an engine that is down
KEPT_CONNECTIONS = (b"keep-alive", b"close")


def without_hops(headers: Headers, more: frozenset[bytes] = frozenset()) -> Headers:
    """Drop the headers of one connection, those that `connection` names, and `more`."""
    passed = [pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in more]
    for name, value in headers:
        if name == CONNECTION and value.lower() not in KEPT_CONNECTIONS:
            named = {word.strip().lower() for word in value.split(b",")}
            passed = [pair for pair in passed if pair[0] not in named]
    return passed


def is_event_stream(headers: Headers) -> bool:
    """Tell whether a response is a stream of server-sent events."""
    return any(name == CONTENT_TYPE and value.startswith(EVENT_STREAM) for name, value in headers)


def engine_error(error: Exception) -> ApiError:
    """Turn a failure of an engine's connection into an error that names no address."""
    if isinstance(error, ConnectError):
        return ApiError(503, "the engine cannot be reached")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the engine did not answer in time")
    return ApiError(502, "the engine broke the connection")
