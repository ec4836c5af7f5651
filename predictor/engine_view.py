"""What a sidecar knows about its engine at a moment, from an exported state or from a mirror."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import NO_TRANSIT, Transit


@dataclass(slots=True, kw_only=True)
class EngineView:
    """An engine model in the state of the engine, reserved requests included, at `now_s` on the engine's clock.

    `clock_rate` is engine seconds per second; `serial` changes with every change of the model; `overdue_s` is by how
    many seconds a step under way exceeds its predicted end; `transit` is the time that requests need to the engine's
    loop and back. `counters` are indicators that do not follow from the model, and `approximations` those of all
    forecasts from this view. `offloaded_hits` returns how many leading blocks of a prompt are on off-loading tiers,
    behind its prefix hits; None where there are none.
    """

    engine: Engine
    forecaster: Forecaster
    now_s: float
    clock_rate: float
    age_s: float
    overdue_s: float
    serial: int
    transit: Transit = NO_TRANSIT
    counters: dict[str, float] = field(default_factory=dict)
    approximations: tuple[str, ...] = ()
    offloaded_hits: Callable[[Sequence[int]], int] | None = None

    @property
    def arrival_s(self) -> float:
        """When a request that is sent now arrives in the engine's loop, on the engine's clock."""
        return self.now_s + self.transit.inward_s * self.clock_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """How a request on the engine ended; durations are in seconds of the wall clock."""

    request_id: str  # the client's
    output_tokens: int
    ttft_s: float | None
    e2e_s: float | None
    completed: bool  # neither aborted nor failed
    num_requests: int = 1  # of the engine
