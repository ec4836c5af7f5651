"""What a recalibration of a profile on a window would change.

Candidates are a factor of all step times, as of a slower machine; the constants that `predictor.fitting.calibration`
can tell; and both. What was held out of their fits decides: a candidate counts where it is much better than all simpler
ones, and a profile that none improves stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.calibration import (
    HELD_OUT_EVERY,
    MIN_REQUESTS,
    NUM_BLOCKS,
    T_90,
    ConstantEstimate,
    MeasuredLatencies,
    calibrate,
)
from predictor.fitting.constants import MEANINGS, NOT_KERNELS, UNITS, Calibrated, scaled
from predictor.fitting.regression import predict, rounded
from predictor.profile import Profile, Transit
from predictor.step_time import StepTime
from simulator.accuracy.replayed_window import RequestTimes, compared_requests, measured_times, replayed_times
from simulator.accuracy.step_errors import PAUSE
from simulator.accuracy.window import CLIENT, Array, ObservedRequest, ObservedSteps, ObservedWindow

if TYPE_CHECKING:
    from predictor.fitting.calibration import CalibratedConstants

OUTSIDE_OF_STEPS = "request_s"  # only a client sees that time
FACTOR = "factor"
MEANING = {**MEANINGS, FACTOR: "all step times, more"}
MIN_STEPS = 40
LARGEST_FACTOR = 8.0
MUCH_BETTER = 0.8  # of the error of a simpler candidate: from there on it counts
NO_ERROR = 1e-3  # smaller ones are equal

Replay = Callable[[StepTime], MeasuredLatencies]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """A profile after recalibration, which is the old one where no change was better; `note` says why.

    `constants` are the changes with their 90 % intervals, and why others are not known; errors are mean relative ones
    of requests and steps that were held out.
    """

    profile: Profile
    constants: tuple[ConstantEstimate, ...] = ()
    error_before: float = float("nan")
    error_after: float = float("nan")
    note: str = ""

    @property
    def changes(self) -> tuple[ConstantEstimate, ...]:
        """The constants that have changed."""
        return tuple(one for one in self.constants if not one.why_not)


def recalibrate(window: ObservedWindow, profile: Profile) -> Recalibration:
    """Choose what to change in a profile, by a window."""
    requests = [one for one in compared_requests(window) if one.first_token_s is not None]
    if len(requests) < MIN_REQUESTS:
        return Recalibration(profile=profile, note=f"{len(requests)} requests are too few, {MIN_REQUESTS} are needed")
    steps = without_pauses(window.steps, profile.step_time)
    truth = _latencies(measured_times(requests), requests)

    def replayed(step_time: StepTime) -> MeasuredLatencies:
        return _latencies(replayed_times(window, requests, step_time, transit=profile.transit), requests)

    def calibrated(step_time: StepTime) -> CalibratedConstants:
        return calibrate(
            Calibrated(step_time=step_time),
            replayed,
            truth,
            steps=steps.columns if len(steps) >= MIN_STEPS else None,
            constants=[name for name in UNITS if window.header.clock == CLIENT or name != OUTSIDE_OF_STEPS],
        )

    if len(steps) >= MIN_STEPS:
        factor = factor_of_steps(steps, profile.step_time)
    else:
        factor = factor_of_requests(profile.step_time, replayed, truth)
    start, slower = calibrated(profile.step_time), calibrated(slowed(profile.step_time, 1.0 + factor.change))
    candidates = [
        Recalibration(profile=profile, error_after=start.error_before, note=_NOTHING),
        _candidate(profile, window, slower, (factor,), slower.error_before, keeps_constants=True),
        _candidate(profile, window, start, (), start.error_after),
        _candidate(profile, window, slower, (factor,), slower.error_after),
    ]
    chosen = candidates[0]
    for one in candidates[1:]:
        if max(NO_ERROR, one.error_after) < MUCH_BETTER * max(NO_ERROR, chosen.error_after):
            chosen = one
    return replace(chosen, error_before=start.error_before)


_NOTHING = "no change reduces the error of what was held out"


def _candidate(  # noqa: PLR0913 - what a candidate consists of
    profile: Profile,
    window: ObservedWindow,
    found: CalibratedConstants,
    factors: tuple[ConstantEstimate, ...],
    error: float,
    *,
    keeps_constants: bool = False,
) -> Recalibration:
    """Return a profile with a factor, or with the constants found, or with both."""
    step_time, request_s, constants = found.result.step_time, found.result.request_s, (*factors, *found.constants)
    if keeps_constants:
        step_time, request_s, constants = slowed(profile.step_time, 1.0 + factors[0].change), 0.0, factors
    counts = "; ".join(
        f"{one.name} {one.change:+.3g} ({one.low:+.3g} to {one.high:+.3g})" for one in constants if not one.why_not
    )
    inward_s = profile.transit.inward_s + request_s / window.header.clock_rate
    made = replace(
        profile,
        name=f"{profile.name.removesuffix('-recalibrated')}-recalibrated",
        step_time=step_time,
        transit=Transit(inward_s=max(0.0, inward_s), outward_s=profile.transit.outward_s),
        source=f"{profile.source}; recalibrated on a window of {len(window.requests)} requests and {len(window.steps)} "
        f"steps: {counts}",
    )
    return Recalibration(profile=made, constants=constants, error_after=error)


def slowed(step_time: StepTime, factor: float) -> StepTime:
    """Return a step time with which every step takes a multiple of the time."""
    others: dict[str, Any] = {name: rounded(factor * getattr(step_time, name)) for name in NOT_KERNELS}
    return replace(scaled(step_time, factor), **others)


# The factor of all step times.


def factor_of_steps(steps: ObservedSteps, step_time: StepTime) -> ConstantEstimate:
    """Estimate it by the time of all steps."""
    predicted, real = predict(step_time, steps.columns), steps.columns.seconds
    blocks = np.minimum(NUM_BLOCKS - 1, np.arange(len(real)) * NUM_BLOCKS // len(real))
    fitted = _is_fitted(blocks)
    ratios = np.array([real[blocks == one].sum() / predicted[blocks == one].sum() for one in range(NUM_BLOCKS)])
    return _factor(float(real[fitted].sum() / predicted[fitted].sum()), ratios)


def factor_of_requests(step_time: StepTime, replay: Replay, truth: MeasuredLatencies) -> ConstantEstimate:
    """Estimate it by replays with several factors."""
    from scipy.optimize import minimize_scalar  # takes a while to import

    blocks = np.arange(len(truth.output_tokens)) * NUM_BLOCKS // len(truth.output_tokens)
    fitted = _is_fitted(blocks)

    def residuals(log: float) -> Array:
        mine, theirs = replay(slowed(step_time, float(np.exp(log)))).metrics(), truth.metrics()
        both = [np.log(np.maximum(mine[name], 1e-9) / np.maximum(theirs[name], 1e-9)) for name in ("e2e", "tpot")]
        both[1][truth.output_tokens < 2] = 0.0
        return np.asarray(both[0] + both[1]) / 2

    widest = float(np.log(LARGEST_FACTOR))
    found = minimize_scalar(
        lambda log: float(np.mean(np.abs(residuals(log)[fitted]))), bounds=(-widest, widest), method="bounded",
        options={"xatol": 1e-3},
    )  # fmt: skip
    left = residuals(float(found.x))
    means = np.array([float(left[blocks == one].mean()) for one in range(NUM_BLOCKS)])
    return _factor(float(np.exp(found.x)), np.exp(found.x - means))


def _is_fitted(blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Leave out the blocks that a calibration holds out."""
    return np.asarray(blocks % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)


def _factor(value: float, ratios: Array) -> ConstantEstimate:
    half = float(T_90 * ratios.std(ddof=1) / np.sqrt(len(ratios)))
    return ConstantEstimate(name=FACTOR, change=value - 1, low=value - 1 - half, high=value - 1 + half)


# What was observed.


def _latencies(times: RequestTimes, requests: list[ObservedRequest]) -> MeasuredLatencies:
    return MeasuredLatencies(
        first_token_s=times.ttft_s,
        last_token_s=times.e2e_s,
        output_tokens=np.array([one.facts.output_tokens for one in requests], np.float64),
        arrival_s=times.arrival_s,
    )


def without_pauses(steps: ObservedSteps, step_time: StepTime) -> ObservedSteps:
    """Leave out steps that took so long that they waited for something else."""
    if not len(steps):
        return steps
    ratio = steps.columns.seconds / np.maximum(predict(step_time, steps.columns), 1e-12)
    return steps.where(ratio <= PAUSE * np.median(ratio))
