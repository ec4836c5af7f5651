"""The regression: a step time is linear in all its coefficients, knots included, so one fit finds all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.compiled import kernel
from predictor.profile import HeldOutError
from predictor.step_time import CURVES, Curve, StepTime
from predictor.tabulated_costs import Costs, step_seconds, tabulate

Array = NDArray[np.float64]

# One row in five is held out, spread by the golden ratio so that it does not coincide with a grid in the data.
HELD_OUT_SHARE = 0.2
GOLDEN_RATIO = (5**0.5 - 1) / 2
# Relative errors above this count linearly, not squared, so that outliers have little weight.
HUBER_ERROR = 0.1
HUBER_ROUNDS = 8
DIGITS = 6

COLUMNS = (
    "num_tokens",
    "num_sampled",
    "num_decodes",
    "decode_context",
    "num_prefills",
    "prefill_qq",
    "prefill_qkv",
    "decode_longest",
    "seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Measured steps: a column per argument of `step_seconds`, and one for the measured seconds."""

    num_tokens: Array
    num_sampled: Array
    num_decodes: Array
    decode_context: Array
    num_prefills: Array
    prefill_qq: Array
    prefill_qkv: Array
    decode_longest: Array
    seconds: Array

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.seconds)

    def where(self, chosen: NDArray[np.bool_]) -> Steps:
        """Return the chosen steps."""
        return Steps(**{name: getattr(self, name)[chosen] for name in COLUMNS})

    @property
    def prefill_tokens(self) -> Array:
        """The tokens of prefill chunks in each step."""
        return self.num_tokens - self.num_decodes


def equal_decodes(chunk: Array, before: Array, decodes: Array, context: Array, seconds: Array) -> Steps:
    """Return steps of at most one prefill chunk, the last of its prompt, and of decodes with equal contexts."""
    prefills = (chunk > 0).astype(float)
    return Steps(
        num_tokens=chunk + decodes,
        num_sampled=prefills + decodes,
        num_decodes=decodes,
        decode_context=decodes * context,
        num_prefills=prefills,
        prefill_qq=chunk**2,
        prefill_qkv=chunk * before,
        decode_longest=context,
        seconds=seconds,
    )


def joined(*parts: Steps) -> Steps:
    """Concatenate measurements."""
    return Steps(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The coefficients that a fit may use: single ones by name, and the knots of each curve.

    Without knots for mixed batches, decodes cost the same beside prefill chunks as alone. A knot listed in `zeros` is
    fixed at zero.
    """

    numbers: Sequence[str] = ("constant_s",)
    by_tokens: Sequence[float] = ()
    by_sequences: Sequence[float] = ()
    decode_base: Sequence[float] = ()
    decode_slope: Sequence[float] = ()
    decode_longest: Sequence[float] = ()
    mixed_base: Sequence[float] = ()
    mixed_slope: Sequence[float] = ()
    mixed_longest: Sequence[float] = ()
    zeros: Mapping[str, Sequence[float]] = field(default_factory=dict)


def has_mixed_kernel(shape: StepShape) -> bool:
    """Return whether decodes beside prefill chunks have coefficients of their own."""
    return bool(shape.mixed_base or shape.mixed_slope)


def fit(steps: Steps, shape: StepShape, *, scale: Array | None = None) -> StepTime:
    """Return the non-negative coefficients with the least squared relative error, with Huber's loss for outliers.

    Errors are relative to `scale`: by default the steps' seconds, else the seconds of the whole that they are part of.
    """
    from sklearn.linear_model import LinearRegression  # takes a second to import

    scale = steps.seconds if scale is None else scale
    parts = _columns(steps, shape)
    matrix = np.column_stack([values for _, _, values in parts]) / scale[:, None]
    target = steps.seconds / scale
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    weights = np.ones(len(target))
    for _ in range(HUBER_ROUNDS):
        line = LinearRegression(positive=True, fit_intercept=False).fit(matrix / norms, target, sample_weight=weights)
        error = np.abs(matrix / norms @ line.coef_ - target)
        weights = np.minimum(1.0, HUBER_ERROR / np.maximum(error, 1e-12))
    return _assemble(shape, [(part, index) for part, index, _ in parts], line.coef_ / norms)


def predict(step_time: StepTime, steps: Steps) -> Array:
    """Predict the seconds of every step with the compiled function that the engine model uses."""
    most_sequences = int(max(steps.num_sampled.max(initial=0), steps.num_decodes.max(initial=0)))
    costs = tabulate(step_time, int(steps.num_tokens.max(initial=0)), most_sequences)
    seconds = np.empty(len(steps))
    _predict_rows(costs, np.column_stack([getattr(steps, name) for name in COLUMNS[:-1]]), seconds)
    return seconds


def error_of(predicted: Array, actual: Array) -> HeldOutError:
    """Summarise relative errors."""
    if len(actual) == 0:
        raise ValueError("seconds: no row is held out, so the error is unknown")
    error = np.abs(predicted - actual) / actual
    return HeldOutError(
        mape=rounded(error.mean()),
        p50=rounded(np.percentile(error, 50)),
        p90=rounded(np.percentile(error, 90)),
        n=len(error),
    )


def held_out(count: int) -> NDArray[np.bool_]:
    """Choose the rows that are held out of all fits: always the same ones."""
    return (np.arange(1, count + 1) * GOLDEN_RATIO) % 1.0 < HELD_OUT_SHARE


def thin_curve(x: Array, y: Array, *, tolerance: float) -> Curve:
    """Return the fewest measured points whose linear interpolation is within a relative tolerance of all others."""
    order = np.argsort(x)
    x, y = x[order], y[order]
    kept = [0, len(x) - 1] if len(x) > 1 else [0]
    while True:
        error = np.abs(np.interp(x, x[kept], y[kept]) - y) / y
        worst = int(np.argmax(error))
        if error[worst] <= tolerance:
            return Curve(x=tuple(float(v) for v in x[kept]), y=tuple(rounded(v) for v in y[kept]))
        kept = sorted([*kept, worst])


def extend_curve(curve: Curve, *, factor: float) -> Curve:
    """Extend a curve to `factor` times its range, by the trend of its upper half instead of its last two knots."""
    x, y = np.array(curve.x), np.array(curve.y)
    upper = x >= x[-1] / 2
    if upper.sum() < 2:
        return curve
    slope = max(0.0, float(np.polyfit(x[upper], y[upper], 1)[0]))
    end = float(x[-1] * factor)
    return Curve(x=(*curve.x, end), y=(*curve.y, rounded(y[-1] + slope * (end - x[-1]))))


def rounded(value: float) -> float:
    """Round to the significant digits of measurements."""
    return float(f"{value:.{DIGITS}g}")


def hat(x: Array, knots: Sequence[float]) -> Array:
    """Return each count's weights on the knots: linear between two knots, the last knot alone beyond it."""
    eye = np.eye(len(knots))
    return np.column_stack([np.interp(x, knots, row) for row in eye])


def _columns(steps: Steps, shape: StepShape) -> list[tuple[str, int, Array]]:
    """Return a column for every coefficient that the fit may use."""
    mixed = (steps.num_prefills > 0) & (steps.num_decodes > 0)
    prefill_tokens = np.maximum(1.0, steps.prefill_tokens)
    has_prefill = (steps.num_prefills > 0).astype(float)
    single = {
        "constant_s": np.ones(len(steps)),
        "token_s": steps.num_tokens,
        "prefill_s": has_prefill,
        "prefill_token_s": has_prefill * steps.prefill_tokens,
        "prefill_qq_s": steps.prefill_qq,
        "prefill_qkv_s": steps.prefill_qkv,
        "prefill_kv_s": steps.prefill_qkv * steps.num_prefills / prefill_tokens,
        "mixed_grid_s": mixed * steps.prefill_qq / prefill_tokens * steps.num_decodes,
    }
    own_kernel = has_mixed_kernel(shape)
    alone = (steps.num_decodes > 0) & ~mixed if own_kernel else steps.num_decodes > 0
    curved: dict[str, tuple[Array, Any]] = {
        "by_tokens": (steps.num_tokens, 1.0),
        "by_sequences": (steps.num_sampled, 1.0),
        "decode_base": (steps.num_decodes, alone),
        "decode_slope": (steps.num_decodes, alone * steps.decode_context),
        "decode_longest": (steps.num_decodes, alone * steps.decode_longest),
        "mixed_base": (steps.num_decodes, mixed),
        "mixed_slope": (steps.num_decodes, mixed * steps.decode_context),
        "mixed_longest": (steps.num_decodes, mixed * steps.decode_longest),
    }
    columns = [(name, 0, single[name]) for name in shape.numbers]
    for name, (count, factor) in curved.items():
        knots = getattr(shape, name)
        if knots:
            weights = hat(count, knots) * ~np.isin(knots, shape.zeros.get(name, ()))
            columns += [(name, index, weights[:, index] * factor) for index in range(len(knots))]
    return columns


def _assemble(shape: StepShape, parts: Sequence[tuple[str, int]], values: Array) -> StepTime:
    """Build the step time from the fitted coefficients."""
    numbers: dict[str, Any] = {
        name: rounded(value) for (name, _), value in zip(parts, values, strict=True) if name in shape.numbers
    }
    curves: dict[str, Any] = {}
    for name in CURVES:
        y = tuple(rounded(value) for (part, _), value in zip(parts, values, strict=True) if part == name)
        if y:
            curves[name] = Curve(x=tuple(float(x) for x in getattr(shape, name)), y=y)
    step_time = StepTime(**numbers, **curves)
    if has_mixed_kernel(shape):
        return step_time
    return replace(
        step_time,
        mixed_base=step_time.decode_base,
        mixed_slope=step_time.decode_slope,
        mixed_longest=step_time.decode_longest,
    )


@kernel
def _predict_rows(costs: Costs, rows: Array, seconds: Array) -> None:
    for i in range(len(rows)):
        row = rows[i]
        seconds[i] = step_seconds(
            costs, int(row[0]), int(row[1]), int(row[2]), row[3], int(row[4]), row[5], row[6], row[7]
        )
