"""The input and the output of a provisioning rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.provisioning.load import LoadModel
from scheduler.provisioning.trend import Trend

Numbers = Mapping[str, float]

RECENT_S = 30.0  # age of the oldest forecast in `forecast_p_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNeeds:
    """How many instances the tiers lack, and which ones of the best-effort pool have nothing to do."""

    num_unmet: int = 0
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """A pool of instances at a moment, and the recent history of its requests."""

    now_s: float
    unix_s: float = 0.0  # time of day, for schedules
    num_ready: int = 0
    num_starting: int = 0
    worst_forecast_s: float = 0.0  # highest predicted latency since the last change
    worst_outcome_s: float = 0.0  # highest latency since the last change
    worst_recent_s: float = 0.0  # highest of both within calm_s
    forecast_p_s: float = 0.0  # the quantile of the objectives, over recent forecasts
    cold_start_s: float = 0.0
    in_flight: int = 0
    num_ended: int = 0  # recent requests
    ready_instance_s: float = 0.0  # time that instances were ready meanwhile, in sum
    num_ended_full: int = 0  # recent requests on instances that had been full for a while
    full_instance_s: float = 0.0  # time that these instances were full, in sum
    since_growth_s: float = math.inf  # since an instance became ready
    ready_in_s: tuple[float, ...] = ()  # until starting instances should be ready, as far as known
    trend: Trend = field(default_factory=Trend)
    load: LoadModel = field(default_factory=LoadModel)
    tiers: TierNeeds | None = None  # None: there are no tiers

    @property
    def num_present(self) -> int:
        """The number of ready and starting instances."""
        return self.num_ready + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """The number of instances that a rule wants at least, and the number to which it allows to shrink."""

    num_wanted: int
    num_enough: int
    why: str
    numbers: Numbers = field(default_factory=dict)


Rule = Callable[[PoolState], ScalingTarget]
