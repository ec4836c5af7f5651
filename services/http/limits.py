"""Limits of HTTP servers on connections, heads, bodies and readers; what is beyond them is refused and counted."""

from __future__ import annotations

import ipaddress
import logging
import math
import time
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter

from services.http.json_body import MAX_JSON_DEPTH
from services.logs import log_event

log = logging.getLogger(__name__)

LOG_S = 10.0  # from one line about a kind of refusal to the next
IPV6_CLIENT_BITS = 64  # of an address: one client usually has all the rest

# Codes of refusals, which are also the values of the metric's label.
HEADERS_TOO_LARGE, URI_TOO_LONG, INVALID_HTTP = "headers_too_large", "uri_too_long", "invalid_http"
HEADER_TIMEOUT, BODY_TIMEOUT, SLOW_READER = "header_timeout", "body_timeout", "slow_reader"
TOO_MANY_CONNECTIONS, TOO_MANY_CLIENT_CONNECTIONS = "too_many_connections", "too_many_client_connections"
REQUEST_TOO_LARGE, JSON_TOO_DEEP = "request_too_large", "json_too_deep"

# What a user may change about each.
SETTINGS = {
    HEADERS_TOO_LARGE: "max_header_bytes, max_headers",
    URI_TOO_LONG: "",
    INVALID_HTTP: "",
    HEADER_TIMEOUT: "header_s",
    BODY_TIMEOUT: "min_body_bytes_per_s",
    SLOW_READER: "slow_reader_s",
    TOO_MANY_CONNECTIONS: "max_connections",
    TOO_MANY_CLIENT_CONNECTIONS: "max_connections_per_client",
    REQUEST_TOO_LARGE: "max_message_mib",
    JSON_TOO_DEEP: "max_json_depth",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits of an HTTP server beside those on the number and the size of requests."""

    max_header_bytes: Annotated[
        int, "Maximum size of the headers of an HTTP request, in bytes; larger ones are refused with status 431."
    ] = 64 * 2**10
    max_headers: Annotated[int, "Maximum number of headers of an HTTP request; more are refused with status 431."] = 100
    max_connections: Annotated[
        int, "Maximum number of open HTTP connections; further ones are closed with status 503."
    ] = 8192
    max_connections_per_client: Annotated[
        int,
        "Maximum number of open HTTP connections of one client address (of an IPv6 network of 64 bits); further ones "
        "are closed with status 429. All clients behind a proxy have its address.",
    ] = 2048
    header_s: Annotated[
        float, "Maximum time for the head of an HTTP request to arrive, in seconds; then it is refused with status 408."
    ] = 10.0
    min_body_bytes_per_s: Annotated[
        int, "Minimum rate at which a request's body arrives after its first 10 seconds; else it is refused with "
        "status 408."
    ] = 1024  # fmt: skip
    slow_reader_s: Annotated[
        float,
        "Maximum time in which a client that has stopped reading its response must read at least 4 KiB, in seconds; "
        "then the connection is closed and the request is cancelled.",
    ] = 30.0
    max_json_depth: Annotated[
        int, "Maximum depth of objects and lists in a body; a deeper one is refused with status 400."
    ] = MAX_JSON_DEPTH

    def __post_init__(self) -> None:
        """Refuse settings that no server can have."""
        for name in ("max_headers", "max_connections", "max_connections_per_client", "min_body_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.max_header_bytes < 1024:
            raise ValueError(f"max_header_bytes: must be at least 1024, not {self.max_header_bytes}")
        if not 4 <= self.max_json_depth <= 512:
            raise ValueError(f"max_json_depth: must lie between 4 and 512, not {self.max_json_depth}")
        for name in ("header_s", "slow_reader_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a number above 0, not {value}")


DEFAULT_LIMITS = HttpLimits()
_COUNTERS: WeakKeyDictionary[CollectorRegistry, Counter] = WeakKeyDictionary()


class Refusals:
    """Counts what the HTTP servers of a process refuse, and logs each kind at most every ten seconds."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Count in a registry, which all servers of a process share, or log only."""
        self._counter = None if registry is None else _counter_of(registry)
        self._logged_s: dict[str, float] = {}
        self._num_unlogged: dict[str, int] = {}

    def note(self, code: str, client: str = "") -> None:
        """Count a refusal of a client's request."""
        if self._counter is not None:
            self._counter.labels(code).inc()
        now_s = time.monotonic()
        if now_s - self._logged_s.get(code, -LOG_S) < LOG_S:
            self._num_unlogged[code] = self._num_unlogged.get(code, 0) + 1
            return
        self._logged_s[code] = now_s
        setting = SETTINGS[code]
        log_event(
            log, logging.WARNING, "request refused", reason=code, client=client or "unknown",
            **({"setting": setting} if setting else {}), more_before=self._num_unlogged.pop(code, 0),
        )  # fmt: skip


def _counter_of(registry: CollectorRegistry) -> Counter:
    counter = _COUNTERS.get(registry)
    if counter is None:
        counter = _COUNTERS[registry] = Counter(
            "block_http_refused",
            "HTTP requests and connections that are refused because of a limit, by the code of the error.",
            ("reason",),
            registry=registry,
        )
        for code in SETTINGS:
            counter.labels(code)
    return counter


class ConnectionTable:
    """Counts open connections, in all and by client."""

    def __init__(self, limits: HttpLimits) -> None:
        """Count none yet."""
        self._limits = limits
        self._num = 0
        self._by_client: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return self._num

    def opened(self, client: str) -> str:
        """Count a connection; return the code of the refusal where it is one too many."""
        self._num += 1
        of_client = self._by_client[client] = self._by_client.get(client, 0) + 1
        if of_client > self._limits.max_connections_per_client:
            return TOO_MANY_CLIENT_CONNECTIONS
        return TOO_MANY_CONNECTIONS if self._num > self._limits.max_connections else ""

    def closed(self, client: str) -> None:
        """Forget a connection."""
        self._num -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


def client_of(host: str) -> str:
    """Return by what a client's connections are counted: its IPv4 address, or its IPv6 network."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    bits = 128 - IPV6_CLIENT_BITS
    return str(ipaddress.IPv6Address(int(address) >> bits << bits))
