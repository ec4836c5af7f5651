"""What a sidecar can be told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predictor.config import EngineConfig
from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from predictor.suggestions import require_known
from services.http.client import origin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSettings:
    """How to stand between an engine and its clients; `engine` are settings of it that it need not tell."""

    engine_url: str
    host: str = "127.0.0.1"
    port: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    speed: float = 1.0  # engine seconds per second; of an emulated one
    counts_prompts: bool = True  # by the engine's /tokenize
    metrics_s: float = 0.5
    max_concurrency: int = 1024
    max_body_bytes: int = 16 * 2**20
    max_answer_bytes: int = 64 * 2**20
    idle_s: float = 600.0  # the longest silence of the engine that is borne
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what no proxy could do, by its name."""
        try:
            origin_of(self.engine_url)
        except ValueError as error:
            raise ValueError(f"engine_url: {error}") from None
        if not 0 <= self.port <= 65535:
            raise ValueError(f"proxy_port: must lie between 0 and 65535, not {self.port}")
        for name, told in (("speed", "engine_speed"), ("metrics_s", "metrics_s"), ("idle_s", "idle_s")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{told}: must be above 0, not {value}")
        EngineConfig(**self.engine)
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency: must be at least 1, not {self.max_concurrency}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """Which engine to stand beside, and how closely to follow it: by its state file, or by mirroring its traffic."""

    instance_id: str
    state_file: str = ""
    mirror: MirrorSettings | None = None
    engine_url: str = ""  # to ask whether it is well; nobody is asked where it is not told
    residual: str = DEFAULT_RESIDUAL

    poll_s: float = 0.1  # how often an engine that shows itself is looked at when nobody asks
    fresh_s: float = 0.15  # a picture that old will do for a forecast, as the engine model runs on from it
    health_s: float = 1.0  # how often it is asked whether it is well, and how long an answer may take
    stall_s: float = 10.0  # a step that is so much later than it was to end is taken for the end of the engine

    forget_s: float = 30.0  # after so long without a step, its pace is learnt anew: it may be well again

    most_reservations: int = 4096
    longest_reservation_s: float = 600.0
    thread_from_s: float = 0.001  # simulations that take longer leave the event loop to others

    def __post_init__(self) -> None:
        """Refuse what no sidecar could do, by its name."""
        if not self.instance_id:
            raise ValueError("instance_id: is missing")
        if bool(self.state_file) == (self.mirror is not None):
            wrong = (
                "an engine that shows its state is not mirrored"
                if self.state_file
                else ("is missing, and so is engine_url: an engine shows its state or has its traffic mirrored")
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


def require_distinct(engines: Sequence[SidecarSettings]) -> None:
    """Refuse engines that no process could stand beside at the same time."""
    if not engines:
        raise ValueError("engine: name at least one")
    names = [settings.instance_id for settings in engines]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"engine: {name!r} is there twice")
    if len(engines) > 1 and any(settings.mirror is not None for settings in engines):
        raise ValueError("engine: one that is mirrored has a sidecar of its own")
