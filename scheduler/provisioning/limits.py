"""How many instances there may be, how fast that may change, and what must not be promised."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from scheduler.provisioning.load import InstanceCapacity

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """What every rule is held to.

    An instance leaves only after fewer have been enough for `calm_s` without a break, and never earlier than that after
    the last change; one more is asked for `cooldown_s` after the last change at the earliest.
    """

    min_instances: int = 1
    max_instances: int = 10
    step: int = 4  # most that start, or leave, at a time
    cooldown_s: float = 15.0
    calm_s: float = 180.0
    starts_per_h: int = 60  # the budget of any hour
    shrink: bool = True  # the paper's rules never do

    def __post_init__(self) -> None:
        """Refuse limits that make no sense, by name."""
        for name, least in (("min_instances", 0), ("max_instances", 1), ("step", 1), ("starts_per_h", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: must be a whole number from {least} on, not {value!r}")
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances: {self.min_instances} is more than max_instances {self.max_instances}")
        if self.starts_per_h < self.min_instances:
            raise ValueError(f"starts_per_h: {self.starts_per_h} are fewer than min_instances {self.min_instances}")
        require_times(self, "cooldown_s", "calm_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """What rules are for: latencies that must not be, how far ahead to look, what one instance bears.

    `seats` and `kv_tokens` are an engine's; 0 is not known. `target_share` of the threshold may be taken by what is
    expected.
    """

    threshold_s: float = 70.0  # e2e; the paper's
    quantile: float = 0.99
    low_share: float = 0.6  # of the threshold: what forecasts stay below while fewer instances would do
    horizon_s: float = 900.0
    cold_start_s: float = 60.0  # as long as none was measured
    target_share: float = 0.95
    seats: int = 0
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse thresholds that make no sense, by name."""
        for name in ("threshold_s", "horizon_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a time above 0, not {value}")
        require_times(self, "cold_start_s")
        for name in ("quantile", "low_share", "target_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}: must lie between 0 and 1, not {getattr(self, name)}")
        if self.cold_start_s > self.horizon_s:
            raise ValueError(f"cold_start_s: {self.cold_start_s:g} is longer than horizon_s {self.horizon_s:g}")
        for name in ("seats", "kv_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be at least 0, not {getattr(self, name)}")

    @property
    def room(self) -> InstanceCapacity:
        """What an instance has of what requests take."""
        return InstanceCapacity(seats=self.seats, kv_tokens=self.kv_tokens)


def require_times(values: object, *names: str) -> None:
    """Refuse spans that are negative or endless."""
    for name in names:
        value = getattr(values, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: must be a time from 0 on, not {value}")


LIMIT_NAMES = tuple(spec.name for spec in fields(ScalingLimits))
AIM_NAMES = tuple(spec.name for spec in fields(Aims))
