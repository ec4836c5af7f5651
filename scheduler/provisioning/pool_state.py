"""What rules see, and what they answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.provisioning.load import Load
from scheduler.provisioning.trend import Trend

Numbers = Mapping[str, float]

LATELY_S = 30.0  # that forecasts are remembered for


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """A pool of instances at a moment, and what was heard of its requests."""

    now_s: float
    unix_s: float = 0.0  # time of day, for what is planned by the clock
    num_ready: int = 0
    num_starting: int = 0
    worst_forecast_s: float = 0.0  # e2e, told since the last change
    worst_outcome_s: float = 0.0
    worst_lately_s: float = 0.0  # of both, as long as calm must last
    forecast_p_s: float = 0.0  # the quantile aimed at, of what was lately told
    cold_start_s: float = 0.0
    in_flight: int = 0
    ends: int = 0  # of requests lately
    ready_s: float = 0.0  # how long instances were there meanwhile, in sum
    full_ends: int = 0  # requests that ended lately on instances that had been full for a while
    full_s: float = 0.0  # and for how long those were, in sum
    same_for_s: float = math.inf  # since when no instance has come up
    ready_in_s: tuple[float, ...] = ()  # of those that start, as far as it is known, when they should be there
    trend: Trend = field(default_factory=Trend)
    load: Load = field(default_factory=Load)

    @property
    def num_present(self) -> int:
        """How many there are or will be, those that leave apart."""
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """How many instances a rule wants, and how few it would be content with."""

    num_wanted: int
    num_enough: int
    why: str
    numbers: Numbers = field(default_factory=dict)


Rule = Callable[[PoolState], ScalingTarget]
