"""Settings of a sidecar process and of each engine that it follows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from predictor.config import EngineConfig
from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from predictor.mirror.engine_kinds import AUTO, ENGINE_KINDS
from predictor.suggestions import require_choice, require_known
from services.http.limits import HttpLimits
from services.http.origin import origin_of
from services.kv_events.settings import KvEventSettings
from services.predictor_server.profile_watch_settings import ProfileWatchSettings
from services.security.exposure import require_tls_beyond_loopback
from services.security.settings import NO_TLS, TlsSettings
from services.settings import Nested, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """The proxy in front of a mirrored engine; `engine` are its settings that cannot be queried."""

    engine_url: str
    host: Annotated[
        str,
        Option(
            "Address of the proxy in front of a mirrored engine, which clients connect to.",
            name="proxy_host",
            unset="the value of --host",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Option("Port of the proxy in front of a mirrored engine.", name="proxy_port")] = 0
    proxy_tls: Annotated[bool, "Serve the proxy in front of a mirrored engine with TLS, where --tls-cert is set."] = (
        True
    )
    engine: Mapping[str, Any] = field(default_factory=dict)
    speed: Annotated[float, Option("Engine seconds per second of a mirrored emulated engine.", name="engine_speed")] = (
        1.0
    )
    counts_prompts: Annotated[
        bool,
        Option(
            "Count the prompt tokens of a mirrored engine by its /tokenize; they are estimated otherwise.",
            name="count_prompts",
        ),
    ] = True
    engine_kind: Annotated[
        str,
        Option(
            "What a mirrored engine is; auto finds out by its replies, and takes one of unknown kind for generic, "
            "whose few parameters are learnt from its traffic.",
            choices=ENGINE_KINDS,
        ),
    ] = AUTO
    kv_events: Annotated[KvEventSettings, Nested()] = field(default_factory=KvEventSettings)
    http: Annotated[HttpLimits, Nested()] = field(default_factory=HttpLimits)
    metrics_s: float = 0.5
    max_concurrency: int = 1024
    max_body_bytes: int = 16 * 2**20
    max_answer_bytes: int = 64 * 2**20
    idle_s: float = 600.0  # maximum pause in a response of the engine
    drain_s: float = 30.0
    tls: TlsSettings = NO_TLS

    def __post_init__(self) -> None:
        """Refuse settings that no proxy can have."""
        require_tls_beyond_loopback(self.host, self.tls, plain=not self.proxy_tls)
        try:
            origin_of(self.engine_url)
        except ValueError as error:
            raise ValueError(f"engine_url: {error}") from None
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: must lie between 0 and 65535, not {self.port}")
        for name in ("speed", "metrics_s", "idle_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be above 0, not {value}")
        EngineConfig(**self.engine)
        require_choice("engine_kind", self.engine_kind, ENGINE_KINDS)
        self.kv_events.require_local(insecure=self.tls.insecure)
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency: must be at least 1, not {self.max_concurrency}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """One engine, and how to follow it: by its state file, or by mirroring its traffic."""

    instance_id: Annotated[str, Option("Name of the instance.", unset="the name of this machine")]
    state_file: Annotated[
        str,
        Option(
            "State file that the engine exports; it may appear later. Without it the engine is mirrored from its "
            "traffic.",
            metavar="FILE",
        ),
    ] = ""
    mirror: MirrorSettings | None = None
    engine_url: Annotated[str, "URL of the engine, for health checks; required to mirror the engine."] = ""
    residual: Annotated[
        str,
        Option("How the rest of a response is predicted once it has started.", choices=tuple(RESIDUALS)),
    ] = DEFAULT_RESIDUAL

    poll_s: Annotated[
        float,
        Option("Interval at which the state is read between requests, in milliseconds.", name="poll_ms", unit="ms"),
    ] = 0.1
    fresh_s: float = 0.15  # maximum age of a state for a forecast: the engine model continues from it
    health_s: Annotated[
        float, "Interval between two health checks of the engine, in seconds; one may take three intervals."
    ] = 1.0
    stall_s: Annotated[
        float, "Delay of a step beyond its predicted end after which the engine counts as down, in seconds."
    ] = 10.0
    forget_s: Annotated[
        float, "Time without a step after which the correction of the step time is reset, in seconds."
    ] = 30.0

    profile_watch: Annotated[ProfileWatchSettings, Nested()] = field(default_factory=ProfileWatchSettings)

    most_reservations: int = 4096
    longest_reservation_s: float = 600.0
    thread_from_s: float = 0.001  # simulations that take longer run on a thread

    def __post_init__(self) -> None:
        """Refuse settings that no sidecar can have."""
        if not self.instance_id:
            raise ValueError("instance_id: is missing")
        if bool(self.state_file) == (self.mirror is not None):
            wrong = (
                "an engine that exports its state is not mirrored"
                if self.state_file
                else "is missing, and so is engine_url: an engine exports its state or is mirrored from its traffic"
            )
            raise ValueError(f"state_file: {wrong}")
        require_known([self.residual], tuple(RESIDUALS), "residual")
        for name in ("poll_s", "health_s", "stall_s", "forget_s", "longest_reservation_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if not (math.isfinite(self.fresh_s) and self.fresh_s >= 0):
            raise ValueError(f"fresh_s: must be a time from 0 on, not {self.fresh_s}")
        if self.most_reservations < 1:
            raise ValueError(f"most_reservations: must be at least 1, not {self.most_reservations}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The engines of a node that one process follows, and their latency profile."""

    engines: Annotated[
        tuple[str, ...],
        Option(
            "One of several engines on this node, in place of --instance-id, --state-file and --engine-url. "
            "Repeatable.",
            name="engine",
            metavar="ID=STATE_FILE[,ENGINE_URL]",
        ),
    ] = ()
    profile: Annotated[
        str,
        Option(
            "Latency profile: the name of a shipped one, or a JSON file.",
            metavar="NAME|FILE",
            unset="the profile that the engine names",
        ),
    ] = ""


def require_distinct(engines: Sequence[SidecarSettings]) -> None:
    """Refuse engines that one process cannot follow at the same time."""
    if not engines:
        raise ValueError("engine: name at least one")
    names = [settings.instance_id for settings in engines]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"engine.instance_id: {name!r} is a duplicate")
    if len(engines) > 1 and any(settings.mirror is not None for settings in engines):
        raise ValueError("engine: a mirrored engine needs a sidecar of its own")
