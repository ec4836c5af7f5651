"""Calibrates the constants that kernel tables lack by replaying a few measured requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.fitting.regression import rounded
from predictor.step_time import StepTime

Array = NDArray[np.float64]

# The constants that can be calibrated, with the starts of the search: CPU time of every step, additional CPU time where
# prefill chunks prevent a single CUDA graph, and communication per token.
STARTS = {"constant_s": 1e-3, "prefill_s": 3e-3, "token_s": 1e-5}
# The time to the first token varies most, because of queueing, so it has the lowest weight.
WEIGHTS = {"tpot": 1.0, "e2e": 1.0, "ttft": 0.25}
TOLERANCE = 1e-3
MAX_REPLAYS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLatencies:
    """The seconds from each request's arrival to its first and last token, and the number of its tokens."""

    first_token_s: Array
    last_token_s: Array
    output_tokens: Array

    def head(self, count: int) -> MeasuredLatencies:
        """Keep the first requests."""
        return MeasuredLatencies(
            first_token_s=self.first_token_s[:count],
            last_token_s=self.last_token_s[:count],
            output_tokens=self.output_tokens[:count],
        )

    def metrics(self) -> dict[str, Array]:
        """Return TTFT, e2e and TPOT of every request."""
        gaps = np.maximum(1.0, self.output_tokens - 1)
        tpot = (self.last_token_s - self.first_token_s) / gaps
        return {"ttft": self.first_token_s, "e2e": self.last_token_s, "tpot": tpot}


Replay = Callable[[StepTime], MeasuredLatencies]


def calibrate(
    step_time: StepTime,
    replay: Replay,
    measured: MeasuredLatencies,
    *,
    num_requests: int,
    constants: Sequence[str] = ("constant_s",),
) -> StepTime:
    """Fit the constants so that the first requests, replayed among all others, have their measured latencies."""
    for name in constants:
        if name not in STARTS:
            raise ValueError(f"constants: {name!r} is none of {', '.join(STARTS)}")
    truth = measured.head(num_requests).metrics()

    def with_constants(factors: Array) -> StepTime:
        changed: dict[str, Any] = {
            name: rounded(getattr(step_time, name) + max(0.0, factor) * STARTS[name])
            for name, factor in zip(constants, factors, strict=True)
        }
        return replace(step_time, **changed)

    def distance(factors: Array) -> float:
        replayed = replay(with_constants(factors)).head(num_requests).metrics()
        # Absolute logarithms: a ratio and its inverse count the same, and outliers have little weight.
        return sum(
            weight * float(np.mean(np.abs(np.log(np.maximum(replayed[name], 1e-9) / truth[name]))))
            for name, weight in WEIGHTS.items()
        ) + float(np.sum(np.maximum(0.0, -factors)))

    from scipy.optimize import minimize  # takes a while to import

    found = minimize(
        distance,
        np.ones(len(constants)),
        method="Nelder-Mead",
        options={
            "xatol": TOLERANCE,
            "fatol": TOLERANCE / 10,
            "maxfev": MAX_REPLAYS,
            "initial_simplex": _simplex(len(constants)),
        },
    )
    return with_constants(found.x)


def _simplex(size: int) -> Array:
    """Return a wide initial simplex: each constant at a tenth and at ten times its start."""
    corners = np.full((size + 1, size), 0.1)
    corners[1:] += 9.9 * np.eye(size)
    return corners
