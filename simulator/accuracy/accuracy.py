"""The accuracy of a profile on a window, and what a recalibration would change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.profile import Profile
from simulator.accuracy.online_correction import corrected
from simulator.accuracy.recalibration import Recalibration, recalibrate
from simulator.accuracy.replayed_window import (
    RequestTimes,
    compared_requests,
    forecast_times,
    measured_times,
    profile_times,
    replayed_times,
)
from simulator.accuracy.request_errors import (
    AggregateError,
    ConcurrencyErrors,
    PhaseError,
    QuantityErrors,
    aggregate_errors,
    concurrency_errors,
    phase_errors,
    quantity_errors,
    relative_errors,
)
from simulator.accuracy.step_errors import ALL, PHASES, StepErrors, outside_share, pace_of, step_errors
from simulator.accuracy.window import ObservedWindow

MIN_SHARE = 0.2  # of the time, from which on a phase by itself can show that a profile does not hold
MIN_REQUESTS = 8
NORMAL = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """By how much predicted times are off in one part of the window; `half` is half the 95 % interval."""

    part: str
    bias: float
    half: float

    def exceeds(self, tolerance: float) -> bool:
        """Return whether it is surely beyond a tolerance."""
        return abs(self.bias) - self.half > tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAccuracy:
    """How a profile did on a window.

    `forecast` are the errors of forecasts at each arrival, which do not know what arrives later, corrected as those for
    clients are; `recalibrated` those of the replay with the recalibrated profile; `with_pace` those that are left where
    every step takes as long as the engine's steps at that time, so that only arrival times, batching and single steps'
    noise differ.
    """

    window: ObservedWindow
    profile: Profile
    measured: RequestTimes
    replayed: RequestTimes
    errors: tuple[QuantityErrors, ...]
    aggregates: list[AggregateError]
    phases: list[PhaseError]
    by_concurrency: list[ConcurrencyErrors]
    steps: list[StepErrors]
    outside: float | None  # the share of the time in batches outside the profile's valid range
    forecast: tuple[QuantityErrors, ...] | None
    with_pace: tuple[QuantityErrors, ...] | None
    recalibration: Recalibration | None
    recalibrated: tuple[QuantityErrors, ...] | None

    @property
    def biases(self) -> list[Bias]:
        """The biases that decide whether the profile holds."""
        if self.steps:
            whole_s = self.steps[0].measured_s
            return [
                Bias(part=one.phase, bias=one.bias, half=one.half)
                for one in self.steps
                if not one.decodes and one.phase in (ALL, *PHASES) and one.measured_s >= MIN_SHARE * whole_s
                if np.isfinite(one.half)
            ]
        return [
            bias for name in ("tpot", "e2e") if (bias := self._bias_of_requests(name)) is not None
        ]  # fmt: skip

    def _bias_of_requests(self, name: str) -> Bias | None:
        errors = relative_errors(getattr(self.replayed, f"{name}_s"), getattr(self.measured, f"{name}_s"))
        if len(errors) < MIN_REQUESTS:
            return None
        logs = np.log(np.maximum(1 + errors, 1e-3))
        spread = np.percentile(logs, 84) - np.percentile(logs, 16)
        return Bias(
            part=name, bias=float(np.median(errors)), half=float(NORMAL * 1.2533 * spread / 2 / len(logs) ** 0.5)
        )

    def holds(self, tolerance: float) -> bool | None:
        """Return whether the profile holds; None where the window is too short to tell."""
        biases = self.biases
        return not any(one.exceeds(tolerance) for one in biases) if biases else None

    @property
    def error_of(self) -> dict[str, QuantityErrors]:
        """The errors by quantity."""
        return {one.quantity: one for one in self.errors}


def accuracy_of(
    window: ObservedWindow, profile: Profile, *, recalibrates: bool = True, explains: bool = True
) -> WindowAccuracy:
    """Replay a window with a profile.

    `explains` adds the errors of forecasts, and those with the measured pace, which needs a replay step by step.
    """
    requests = compared_requests(window)
    measured, replayed = measured_times(requests), profile_times(window, requests, profile)
    forecast = with_pace = recalibrated = None
    if explains:
        times = forecast_times(window, requests, profile.step_time, transit=profile.transit)
        forecast = quantity_errors(corrected(times, measured), measured)
    if explains and len(window.steps):
        pace_at = pace_of(window.steps, profile.step_time)
        times = replayed_times(window, requests, profile.step_time, transit=profile.transit, pace_at=pace_at)
        with_pace = quantity_errors(times, measured)
    recalibration = recalibrate(window, profile) if recalibrates else None
    if recalibration is not None:
        recalibrated = quantity_errors(profile_times(window, requests, recalibration.profile), measured)
    return WindowAccuracy(
        window=window,
        profile=profile,
        measured=measured,
        replayed=replayed,
        errors=quantity_errors(replayed, measured),
        aggregates=aggregate_errors(replayed, measured),
        phases=phase_errors(replayed, measured),
        by_concurrency=concurrency_errors(replayed, measured),
        steps=step_errors(window.steps, profile.step_time),
        outside=outside_share(window.steps.columns, profile.valid) if len(window.steps) else None,
        forecast=forecast,
        with_pace=with_pace,
        recalibration=recalibration,
        recalibrated=recalibrated,
    )


def verdict(accuracy: WindowAccuracy, tolerance: float) -> str:
    """Say in one line whether the profile holds."""
    holds = accuracy.holds(tolerance)
    if holds is None:
        return "the window is too short to tell whether the profile holds"
    if holds:
        return f"the profile holds: no bias is surely beyond {100 * tolerance:g} %"
    worst = max((one for one in accuracy.biases if one.exceeds(tolerance)), key=lambda one: abs(one.bias))
    return (
        f"the profile does not hold: {worst.part} is predicted {100 * worst.bias:+.1f} % "
        f"(± {100 * worst.half:.1f}) off, more than {100 * tolerance:g} %"
    )


def plain_errors(errors: tuple[QuantityErrors, ...] | None) -> dict[str, Any] | None:
    """Convert errors for JSON."""
    if errors is None:
        return None
    return {one.quantity: {"median": one.median, "p90": one.p90, "bias": one.bias, "n": one.num} for one in errors}
