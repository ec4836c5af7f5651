"""The constants that kernel tables lack or get wrong, as changes of a step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.fitting.regression import rounded
from predictor.step_time import CURVES, LARGEST, NUMBERS, Curve, Grid, StepTime

# CPU time of every step; more of it where prefill chunks prevent a single CUDA graph; communication per token; CPU time
# per sequence of a step; time of a request outside of steps; and all kernels' times, relative to the tables. Each with
# the unit in which a search changes it, and in this order where several would do as well.
UNITS = {
    "constant_s": 1e-3,
    "prefill_s": 3e-3,
    "token_s": 2e-6,
    "sequence_s": 1e-5,
    "request_s": 5e-3,
    "scale": 0.02,
}
MEANINGS = {
    "constant_s": "CPU time a step",
    "prefill_s": "more CPU time a step with prefill chunks",
    "token_s": "communication a token",
    "sequence_s": "CPU time a sequence of a step",
    "request_s": "time of a request outside of steps",
    "scale": "kernels over the tables",
}
LEAST_SCALE = 0.25
NOT_KERNELS = ("constant_s", "empty_s", "prefill_s", "token_s")
MOST_SEQUENCES = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A step time, and the time of a request outside of steps."""

    step_time: StepTime
    request_s: float = 0.0

    def least(self, name: str) -> float:
        """Return the largest decrease of a constant that leaves no negative time."""
        if name == "scale":
            return LEAST_SCALE - 1.0
        if name == "request_s":
            return -self.request_s
        return 0.0 if name == "sequence_s" else -float(getattr(self.step_time, name))

    def changed(self, by: Mapping[str, float]) -> Calibrated:
        """Add to constants; `scale` adds a share to all kernels."""
        limited = {name: max(value, self.least(name)) for name, value in by.items()}
        step_time = scaled(self.step_time, 1.0 + limited.get("scale", 0.0))
        numbers: dict[str, Any] = {
            name: rounded(getattr(step_time, name) + limited.get(name, 0.0)) for name in NOT_KERNELS if name in limited
        }
        if sequence_s := limited.get("sequence_s", 0.0):
            numbers["by_sequences"] = _sloped(step_time.by_sequences, sequence_s)
        request_s = rounded(self.request_s + limited.get("request_s", 0.0))
        return Calibrated(step_time=replace(step_time, **numbers), request_s=request_s)


def scaled(step_time: StepTime, factor: float) -> StepTime:
    """Multiply the times of all kernels."""
    if factor == 1.0:
        return step_time
    changes: dict[str, Any] = {
        name: rounded(getattr(step_time, name) * factor) for name in NUMBERS if name not in NOT_KERNELS
    }
    for name in CURVES:
        curve = getattr(step_time, name)
        changes[name] = Curve(x=curve.x, y=tuple(rounded(min(y * factor, LARGEST)) for y in curve.y))
    for name in ("decode_attention", "mixed_attention", "prefill_attention"):
        grid = getattr(step_time, name)
        changes[name] = Grid(x=grid.x, y=grid.y, z=tuple(tuple(rounded(z * factor) for z in row) for row in grid.z))
    return replace(step_time, **changes)


def _sloped(curve: Curve, slope: float) -> Curve:
    """Add so many seconds per count."""
    x = curve.x if len(curve.x) > 1 else (*curve.x, max(MOST_SEQUENCES, curve.x[-1] + 1))
    y = curve.y if len(curve.y) > 1 else (*curve.y, curve.y[-1])
    if x[0] > 0:
        x, y = (0.0, *x) if x[0] >= 1 else x, (y[0], *y) if x[0] >= 1 else y
    return Curve(x=x, y=tuple(rounded(value + slope * count) for count, value in zip(x, y, strict=True)))
