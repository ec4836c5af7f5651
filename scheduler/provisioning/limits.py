"""Limits of the number of instances and of its changes, and the targets of the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from scheduler.provisioning.load import InstanceCapacity

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """The limits of every rule.

    An instance is removed only after fewer have been enough for `calm_s` without a break, and never earlier than that
    after the last change; one is added `cooldown_s` after the last change at the earliest.
    """

    min_instances: Annotated[int, "Minimum number of instances."] = 1
    max_instances: Annotated[int, "Maximum number of instances."] = 10
    step: Annotated[int, "Maximum number of instances that start, or leave, at a time."] = 4
    cooldown_s: Annotated[float, "Minimum time from a change to the next start, in seconds."] = 15.0
    calm_s: Annotated[float, "Time for which fewer instances must have been enough before one leaves, in seconds."] = (
        180.0
    )
    starts_per_h: Annotated[int, "Maximum number of starts within any hour."] = 60
    shrink: Annotated[bool, "Whether instances are ever removed."] = True  # the paper's rules never do

    def __post_init__(self) -> None:
        """Check the values; ValueError names the field."""
        for name, minimum in (("min_instances", 0), ("max_instances", 1), ("step", 1), ("starts_per_h", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}: must be a whole number from {minimum} on, not {value!r}")
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances: {self.min_instances} is more than max_instances {self.max_instances}")
        if self.starts_per_h < self.min_instances:
            raise ValueError(f"starts_per_h: {self.starts_per_h} are fewer than min_instances {self.min_instances}")
        require_times(self, "cooldown_s", "calm_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingObjectives:
    """The targets of rules: a latency to stay below, how far ahead to plan, and the capacity of an instance."""

    threshold_s: Annotated[float, "End-to-end latency to stay below, in seconds."] = 70.0  # the paper's
    quantile: Annotated[float, "Quantile of the forecasts that `headroom` keeps below the threshold."] = 0.99
    low_share: Annotated[float, "Share of the threshold below which `preempt` and `relief` remove instances."] = 0.6
    horizon_s: Annotated[float, "How far ahead to plan at most, in seconds."] = 900.0
    cold_start_s: Annotated[float, "Cold start of an instance until one has been measured, in seconds."] = 60.0
    target_share: Annotated[float, "Share of the threshold that `headroom` plans for."] = 0.95
    seats: Annotated[int, "max-num-seqs of an engine; 0: unknown."] = 0
    kv_tokens: Annotated[int, "KV cache of an engine in tokens; 0: unknown."] = 0

    def __post_init__(self) -> None:
        """Check the values; ValueError names the field."""
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
    def capacity(self) -> InstanceCapacity:
        """The limits of an engine."""
        return InstanceCapacity(seats=self.seats, kv_tokens=self.kv_tokens)


def require_times(values: object, *names: str) -> None:
    """Refuse times that are negative or infinite."""
    for name in names:
        value = getattr(values, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: must be a time from 0 on, not {value}")
