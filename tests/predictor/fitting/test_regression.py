"""The regression recovers the coefficients of the data, and returns its error on held-out rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.fitting.regression import (
    Steps,
    StepShape,
    error_of,
    extend_curve,
    fit,
    held_out,
    joined,
    predict,
    thin_curve,
)
from predictor.step_time import Curve, StepTime

TRUTH = StepTime(
    constant_s=2e-3,
    prefill_s=1e-3,
    prefill_qq_s=3e-9,
    prefill_qkv_s=5e-9,
    by_tokens=Curve(x=(1.0, 256.0, 2048.0), y=(5e-3, 8e-3, 60e-3)),
    decode_slope=Curve(x=(1.0, 64.0), y=(2e-7, 1e-7)),
    mixed_slope=Curve(x=(1.0, 64.0), y=(2e-7, 1e-7)),
)
SHAPE = StepShape(
    numbers=("prefill_s", "prefill_qq_s", "prefill_qkv_s"), by_tokens=(1, 256, 2048), decode_slope=(1, 64)
)


def random_steps(count: int, seed: int = 0) -> Steps:
    """Batches of up to 64 decodes and at most one chunk, timed by the truth."""
    draw = np.random.default_rng(seed)
    decodes = draw.integers(0, 65, count).astype(float)
    chunk = np.where(draw.random(count) < 0.5, draw.integers(1, 1500, count), 0).astype(float)
    decodes = np.where(chunk + decodes == 0, 1.0, decodes)
    before = draw.integers(0, 3000, count) * (chunk > 0)
    context = np.floor(decodes * draw.integers(1, 3000, count))
    steps = Steps(
        num_tokens=decodes + chunk,
        num_sampled=decodes + (chunk > 0),
        num_decodes=decodes,
        decode_context=context,
        num_prefills=(chunk > 0).astype(float),
        prefill_qq=chunk**2,
        prefill_qkv=chunk * before,
        decode_longest=np.zeros(count),
        seconds=np.zeros(count),
    )
    return replace(steps, seconds=predict(TRUTH, steps))


def test_finds_the_truth_in_clean_data() -> None:
    """From steps of a known step time, the fit predicts other steps within a tenth of a percent."""
    fitted = fit(random_steps(600), SHAPE)
    others = random_steps(200, seed=1)
    assert error_of(predict(fitted, others), others.seconds).p90 < 1e-3
    assert fitted.prefill_qq_s == pytest.approx(TRUTH.prefill_qq_s, rel=0.02)
    assert fitted.decode_slope.y == pytest.approx(TRUTH.decode_slope.y, rel=0.02)


def test_outliers_have_little_effect() -> None:
    """One step in twenty that takes ten times as long changes predictions by less than 2 %."""
    steps = random_steps(800)
    hiccups = np.where(np.arange(800) % 20 == 7, 10.0, 1.0)
    fitted = fit(replace(steps, seconds=steps.seconds * hiccups), SHAPE)
    assert error_of(predict(fitted, steps), steps.seconds).p50 < 0.02


def test_no_number_is_negative() -> None:
    """Where the data suggests a negative coefficient, it is zero."""
    steps = random_steps(300)
    falling = replace(steps, seconds=1.0 / (1.0 + steps.decode_context))
    fitted = fit(falling, SHAPE)
    assert min(fitted.decode_slope.y) >= 0
    assert min(fitted.by_tokens.y) >= 0


def test_knots_fixed_at_zero_stay_zero() -> None:
    """A knot that the shape fixes at zero is zero after the fit, and others are not."""
    shape = replace(SHAPE, decode_longest=(10, 11, 40), zeros={"decode_longest": (10, 40)})
    steps = random_steps(400)
    waiting = replace(steps, decode_longest=np.full(400, 500.0))
    waits = predict(replace(TRUTH, decode_longest=Curve(x=(10.0, 11.0, 40.0), y=(0.0, 1e-5, 0.0))), waiting)
    fitted = fit(replace(waiting, seconds=waits), shape)
    assert fitted.decode_longest.y[0] == fitted.decode_longest.y[2] == 0.0
    assert fitted.decode_longest.y[1] > 1e-6


def test_one_row_in_five_is_held_out_evenly() -> None:
    """The rows held out are a fifth, the same every time, and spread over the data."""
    chosen = held_out(1000)
    assert np.array_equal(chosen, held_out(1000))
    assert chosen.sum() == pytest.approx(200, abs=2)
    assert all(chosen[start : start + 100].sum() == pytest.approx(20, abs=2) for start in range(0, 1000, 100))


def test_error_figures() -> None:
    """The errors are relative, and need at least one row."""
    error = error_of(np.array([1.1, 2.0, 2.7]), np.array([1.0, 2.0, 3.0]))
    assert error.mape == pytest.approx(0.2 / 3, rel=1e-4)
    assert error.p50 == pytest.approx(0.1)
    assert error.n == 3
    with pytest.raises(ValueError, match=r"^seconds: "):
        error_of(np.array([]), np.array([]))


def test_thin_curve_keeps_within_tolerance() -> None:
    """A thinned curve has fewer knots, and is within the tolerance at every point."""
    x = np.arange(1.0, 500.0)
    y = 1.0 + np.floor(x / 100)
    curve = thin_curve(x, y, tolerance=0.01)
    assert len(curve.x) < 20
    assert np.max(np.abs(np.interp(x, curve.x, curve.y) - y) / y) <= 0.01
    assert thin_curve(np.array([3.0]), np.array([2.0]), tolerance=0.01) == Curve(x=(3.0,), y=(2.0,))


def test_extended_curve_follows_the_trend() -> None:
    """A curve is extended by the trend of its upper half, not of its last knots."""
    curve = extend_curve(Curve(x=(0.0, 50.0, 75.0, 99.0, 100.0), y=(0.0, 50.0, 75.0, 99.0, 98.0)), factor=4.0)
    assert curve.x[-1] == 400.0
    assert curve.y[-1] == pytest.approx(400.0, rel=0.03)


def test_joined_and_chosen_rows() -> None:
    """Measurements can be concatenated and selected."""
    first, second = random_steps(10), random_steps(5, seed=2)
    both = joined(first, second)
    assert len(both) == 15
    assert np.array_equal(both.where(np.arange(15) >= 10).seconds, second.seconds)
