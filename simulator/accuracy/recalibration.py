"""What a recalibration of a profile on a window would change.

A factor of all step times, a constant per step, or both: whichever is best on steps, or else on requests, that were
held out. A profile that no candidate improves there stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.regression import error_of, predict, rounded
from predictor.profile import Profile
from predictor.step_time import CURVES, GRIDS, NUMBERS, StepTime
from simulator.accuracy.replayed_window import compared_requests, measured_times, replayed_times
from simulator.accuracy.request_errors import relative_errors
from simulator.accuracy.step_errors import NUM_BLOCKS, PAUSE, STUDENT_T
from simulator.accuracy.window import Array, ObservedSteps, ObservedWindow

FACTOR, CONSTANT = "factor", "constant_s"
MIN_STEPS = 4 * NUM_BLOCKS
MIN_REQUESTS = 16
WORTH_IT = 0.98  # of the error without a change, at most
NO_ERROR = 1e-4  # smaller ones are equal
LARGEST_FACTOR = 8.0
QUANTITIES = {"tpot_s": 1.0, "e2e_s": 1.0, "ttft_s": 0.25}  # with weights: TTFT varies most, because of queueing


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantChange:
    """One constant of a profile, before and after; `half` is half the 95 % interval, NaN where it is not known."""

    name: str
    before: float
    after: float
    half: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """A profile after recalibration, which may be the old one, and the errors on what was held out: before and after.

    `held_out` says of what: steps or requests.
    """

    profile: Profile
    changes: tuple[ConstantChange, ...]
    held_out: str
    error_before: float
    error_after: float
    note: str = ""


def recalibrate(window: ObservedWindow, profile: Profile) -> Recalibration:
    """Fit a profile's factor and constant to a window."""
    steps = _without_pauses(window.steps, profile.step_time)
    if len(steps) >= MIN_STEPS:
        return _by_steps(steps, profile)
    return _by_requests(window, profile)


def scaled(step_time: StepTime, factor: float, more_s: float = 0.0) -> StepTime:
    """Return a step time multiplied by a factor, with `more_s` in every step."""
    numbers: dict[str, Any] = {name: rounded(factor * getattr(step_time, name)) for name in NUMBERS}
    numbers["constant_s"] = rounded(max(0.0, factor * step_time.constant_s + more_s))
    curves = {name: getattr(step_time, name) for name in CURVES}
    grids = {name: getattr(step_time, name) for name in GRIDS if name != "mixed_overlap"}  # that one has shares
    return replace(
        step_time,
        **numbers,
        **{name: replace(curve, y=tuple(rounded(factor * y) for y in curve.y)) for name, curve in curves.items()},
        **{
            name: replace(grid, z=tuple(tuple(rounded(factor * z) for z in row) for row in grid.z))
            for name, grid in grids.items()
        },
    )


def _without_pauses(steps: ObservedSteps, step_time: StepTime) -> ObservedSteps:
    if not len(steps):
        return steps
    ratio = steps.columns.seconds / np.maximum(predict(step_time, steps.columns), 1e-12)
    return steps.where(ratio <= PAUSE * np.median(ratio))


# By steps.


def _by_steps(steps: ObservedSteps, profile: Profile) -> Recalibration:
    real, predicted = steps.columns.seconds, predict(profile.step_time, steps.columns)
    block = np.arange(len(real)) * NUM_BLOCKS // len(real)
    train, test = block % 2 == 0, block % 2 == 1
    before = _step_error(predicted[test], real[test])
    found = [
        (_step_error(fit(predicted[train], real[train]).applied_to(predicted[test]), real[test]), fit)
        for fit in (_factor, _constant, _factor_and_constant)
    ]
    best = min(error for error, _ in found)
    after, fit = next((error, fit) for error, fit in found if error * WORTH_IT <= best)
    if after > WORTH_IT * before:
        return _unchanged(profile, "steps", before)
    chosen = fit(predicted, real)
    parts = [fit(predicted[block == number], real[block == number]) for number in range(NUM_BLOCKS)]
    step_time = scaled(profile.step_time, chosen.factor, chosen.more_s)
    changes = _changes(profile, chosen, _half([one.factor for one in parts]), _half([one.more_s for one in parts]))
    held_out = steps.where(test).columns
    error = error_of(predict(step_time, held_out), held_out.seconds)
    return Recalibration(
        profile=replace(_renamed(profile, changes, f"{len(real)} steps"), step_time=step_time, error=error),
        changes=changes,
        held_out="steps",
        error_before=before,
        error_after=after,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    factor: float = 1.0
    more_s: float = 0.0

    def applied_to(self, predicted: Array) -> Array:
        return self.factor * predicted + self.more_s


def _factor(predicted: Array, real: Array) -> _Fit:
    return _Fit(factor=float(real.sum() / predicted.sum()))


def _constant(predicted: Array, real: Array) -> _Fit:
    return _Fit(more_s=float(np.mean(real - predicted)))


def _factor_and_constant(predicted: Array, real: Array) -> _Fit:
    """Fit a line with the least squared relative error; where steps are too alike for two numbers, a factor."""
    matrix = np.column_stack((predicted, np.full(len(predicted), predicted.mean()))) / real[:, None]
    (factor, share), _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(real)), rcond=1e-6)
    if rank < 2 or not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
        return _factor(predicted, real)
    return _Fit(factor=float(factor), more_s=float(share * predicted.mean()))


def _step_error(predicted: Array, real: Array) -> float:
    return max(NO_ERROR, float(np.mean(np.abs(predicted - real) / real)))


def _half(values: list[float]) -> float:
    return float(STUDENT_T * np.std(values, ddof=1) / np.sqrt(len(values)))


# By requests alone.


def _by_requests(window: ObservedWindow, profile: Profile) -> Recalibration:
    requests = compared_requests(window)
    if len(requests) < MIN_REQUESTS:
        note = f"{len(requests)} requests and {len(window.steps)} steps are too few to recalibrate"
        return _unchanged(profile, "requests", float("nan"), note)
    measured = measured_times(requests)
    train = np.arange(len(requests)) % 2 == 0

    def error_with(fit: _Fit, chosen: NDArray[np.bool_]) -> float:
        step_time = scaled(profile.step_time, fit.factor, fit.more_s)
        times = replayed_times(window, requests, step_time, transit=profile.transit)
        ours, theirs = times.where(chosen), measured.where(chosen)
        parts = [
            (weight, relative_errors(getattr(ours, name), getattr(theirs, name))) for name, weight in QUANTITIES.items()
        ]
        return sum(
            weight * float(np.mean(np.abs(np.log(np.maximum(1 + errors, 1e-3)))))
            for weight, errors in parts
            if len(errors)
        )

    before = error_with(_Fit(), ~train)
    found = [(error_with(fit, ~train), fit) for fit in _searched(lambda fit: error_with(fit, train), profile)]
    after, chosen = min(found, key=lambda one: one[0])
    if after > WORTH_IT * before:
        return _unchanged(profile, "requests", before)
    changes = _changes(profile, chosen, float("nan"), float("nan"))
    return Recalibration(
        profile=replace(
            _renamed(profile, changes, f"{len(requests)} requests"),
            step_time=scaled(profile.step_time, chosen.factor, chosen.more_s),
        ),
        changes=changes,
        held_out="requests",
        error_before=before,
        error_after=after,
    )


def _searched(error: Callable[[_Fit], float], profile: Profile) -> Iterator[_Fit]:
    """Yield the best factor, and the best constant."""
    from scipy.optimize import minimize_scalar  # takes a while to import

    widest = float(np.log(LARGEST_FACTOR))
    found = minimize_scalar(
        lambda log: error(_Fit(factor=float(np.exp(log)))),
        bounds=(-widest, widest),
        method="bounded",
        options={"xatol": 1e-3},
    )
    yield _Fit(factor=float(np.exp(found.x)))
    least_s = -profile.step_time.constant_s
    usual_s = max(1e-3, -least_s)
    found = minimize_scalar(
        lambda more_s: error(_Fit(more_s=float(more_s))), bounds=(least_s, 10 * usual_s), method="bounded",
        options={"xatol": 1e-3 * usual_s},
    )  # fmt: skip
    yield _Fit(more_s=float(found.x))


# Results.


def _unchanged(profile: Profile, held_out: str, error: float, note: str = "") -> Recalibration:
    return Recalibration(
        profile=profile,
        changes=(),
        held_out=held_out,
        error_before=error,
        error_after=error,
        note=note or f"no change makes the {held_out} that were held out better",
    )


def _changes(profile: Profile, fit: _Fit, factor_half: float, more_half: float) -> tuple[ConstantChange, ...]:
    changes = []
    if fit.factor != 1.0:
        changes.append(ConstantChange(name=FACTOR, before=1.0, after=fit.factor, half=factor_half))
    if fit.more_s != 0.0:
        before = profile.step_time.constant_s
        after = max(0.0, fit.factor * before + fit.more_s)
        changes.append(ConstantChange(name=CONSTANT, before=before, after=after, half=more_half))
    return tuple(changes)


def _renamed(profile: Profile, changes: tuple[ConstantChange, ...], what: str) -> Profile:
    text = ", ".join(f"{one.name} {one.before:.4g} to {one.after:.4g}" for one in changes)
    return replace(
        profile,
        name=f"{profile.name.removesuffix('-recalibrated')}-recalibrated",
        source=f"{profile.source}; recalibrated on {what} of a window: {text}",
    )
