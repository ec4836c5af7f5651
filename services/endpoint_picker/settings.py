"""Settings of the endpoint picker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from services.placement.decision_time import DECIDE_S, require_schedule_s
from services.settings import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """Ports, certificates, timeouts, and what is read of requests and responses."""

    secure_serving: Annotated[
        bool,
        "Serve TLS to the proxy: by the certificate of --cert-path or --tls-cert, or else by a self-signed one that is "
        "made at the start.",
    ] = True
    cert_path: Annotated[
        str,
        Option("Folder with the certificate tls.crt and its key tls.key, as --tls-cert and --tls-key.", metavar="DIR"),
    ] = ""
    schedule_s: Annotated[
        float | None,
        Option(
            "Maximum time that a decision may take, in seconds; the proxy's message_timeout has to be longer. A "
            "request that a policy such as slo or hold keeps waiting is refused, or sent to the best instance, before "
            "that.",
            unset=f"{DECIDE_S:g}; with a policy that holds requests, as long as it may: 75 with slo",
        ),
    ] = None
    accept_s: Annotated[
        float,
        "Time after SIGTERM for which new requests are still taken, while the health service says NOT_SERVING, in "
        "seconds; then those under way are finished, at most drain_s.",
    ] = 0.0
    max_endpoints: Annotated[
        int,
        "Maximum number of endpoints in an answer: the chosen one, and the next best ones for retries; 1 for proxies "
        "that take one address only, such as Envoy's clusters of type ORIGINAL_DST.",
    ] = 4
    allow_kv_transfer_params: Annotated[
        bool,
        "Pass kv_transfer_params of clients on to engines, where they can name the KV blocks of other clients; such "
        "requests are served by one engine.",
    ] = False
    refuse_unknown_objectives: Annotated[
        bool,
        "Refuse requests whose objective is not known with status 400, as gateways do. Without it the request is "
        "placed as one without an objective, and counted: another picker may know the name.",
    ] = False
    conformance_pool: Annotated[
        str,
        Option(
            "Test mode: take the endpoints that the header test-epp-endpoint-selection names, and tell in the headers "
            "of responses which endpoint served, as the picker of this InferencePool in the conformance tests of the "
            "Gateway API.",
            metavar="NAMESPACE/NAME",
        ),
    ] = ""
    max_body_bytes: int = 16 * 2**20
    max_streams: int = 8192  # HTTP requests under way

    def __post_init__(self) -> None:
        """Refuse settings that no picker can have."""
        require_schedule_s(self.schedule_s)
        if not (math.isfinite(self.accept_s) and self.accept_s >= 0):
            raise ValueError(f"accept_s: must be a time from 0 on, not {self.accept_s}")
        if self.max_endpoints < 1:
            raise ValueError(f"max_endpoints: must be at least 1, not {self.max_endpoints}")
        if self.cert_path and not self.secure_serving:
            raise ValueError("cert_path: has no effect without TLS; leave out --no-secure-serving")
