"""What a sidecar can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from services.names import require_known


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """Which engine to stand beside, and how closely to follow it."""

    instance_id: str
    state_file: str
    engine_url: str = ""  # to ask whether it is well; nobody is asked where it is not told
    residual: str = DEFAULT_RESIDUAL

    poll_s: float = 0.1  # how often an engine that shows itself is looked at when nobody asks
    fresh_s: float = 0.15  # a picture that old will do for a forecast, as the engine model runs on from it
    health_s: float = 1.0  # how often it is asked whether it is well, and how long an answer may take
    stall_s: float = 10.0  # a step that is so much later than it was to end is taken for the end of the engine

    forget_s: float = 30.0  # after so long without a step, its pace is learnt anew: it may be well again

    most_reservations: int = 4096
    longest_reservation_s: float = 600.0
    most_at_once: int = 256  # requests in one question
    thread_from_s: float = 0.001  # simulations that take longer leave the event loop to others

    def __post_init__(self) -> None:
        """Refuse what no sidecar could do, by its name."""
        if not self.instance_id:
            raise ValueError("instance_id: is missing")
        if not self.state_file:
            raise ValueError("state_file: is missing")
        require_known([self.residual], tuple(RESIDUALS), "residual")
        for name in ("poll_s", "health_s", "stall_s", "forget_s", "longest_reservation_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        if not (math.isfinite(self.fresh_s) and self.fresh_s >= 0):
            raise ValueError(f"fresh_s: must be a time from 0 on, not {self.fresh_s}")
        for name in ("most_reservations", "most_at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
