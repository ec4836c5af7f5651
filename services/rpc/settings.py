"""Settings of every gRPC server."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from services.security.access_settings import AccessSettings
from services.security.exposure import require_tls_beyond_loopback
from services.security.settings import NO_TLS, TlsSettings
from services.settings import Nested

MAX_MESSAGE_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and its limits."""

    host: Annotated[str, "Address to listen on; 0.0.0.0 listens on all interfaces."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0 selects any free port."] = 0
    metrics_port: Annotated[int | None, "Port that serves Prometheus metrics at /metrics; none is served without."] = (
        None
    )
    health_port: Annotated[
        int | None,
        "Port that serves grpc.health.v1 without TLS, for probes; the main port serves it in any case.",
    ] = None
    max_concurrency: Annotated[int, "Maximum number of calls in progress; further calls are refused."] = 1024
    max_message_mib: Annotated[int, "Maximum size of a message, in mebibytes."] = 16
    drain_s: Annotated[float, "Maximum time to wait at shutdown for calls in progress, in seconds."] = 30.0
    access: Annotated[AccessSettings, Nested()] = field(default_factory=AccessSettings)
    tls: TlsSettings = NO_TLS

    def __post_init__(self) -> None:
        """Refuse settings that no server can have."""
        for name in ("port", "metrics_port", "health_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ValueError(f"{name}: must lie between 0 and 65535, not {value}")
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency: must be at least 1, not {self.max_concurrency}")
        if not 1 <= self.max_message_mib <= MAX_MESSAGE_MIB:
            raise ValueError(f"max_message_mib: must lie between 1 and {MAX_MESSAGE_MIB}, not {self.max_message_mib}")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ValueError(f"drain_s: must be a time from 0 on, not {self.drain_s}")
        require_tls_beyond_loopback(self.host, self.tls)
