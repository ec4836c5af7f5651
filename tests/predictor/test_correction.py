"""The online correction follows a drift, smooths an outlier, and stays within its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.correction import MIN_STEPS, Correction, CorrectionRule, RegionCorrection
from predictor.step_time import DECODE_REGION, PREFILL_REGION


def test_starts_at_one() -> None:
    """Without observed steps, predictions are unchanged."""
    assert Correction().factor == 1.0


def test_follows_a_constant_drift() -> None:
    """The factor of an engine that is 30 % slower than predicted converges to 1.3."""
    correction = Correction()
    for _ in range(200):
        correction = correction.observe(predicted_s=0.020, real_s=0.026)
    assert correction.factor == pytest.approx(1.3, rel=1e-3)


def test_is_the_formula_of_the_paper() -> None:
    """Each step moves the factor to θ·β + (1-θ)·mean(real / predicted) over the window."""
    correction = Correction(rule=CorrectionRule(momentum=0.5, window=2))
    correction = correction.observe(predicted_s=1.0, real_s=2.0)
    assert correction.factor == pytest.approx(0.5 * 1.0 + 0.5 * 2.0)
    correction = correction.observe(predicted_s=1.0, real_s=1.0)
    assert correction.factor == pytest.approx(0.5 * 1.5 + 0.5 * 1.5)
    correction = correction.observe(predicted_s=2.0, real_s=1.0)
    assert correction.factor == pytest.approx(0.5 * 1.5 + 0.5 * 0.75)


def test_smooths_an_outlier() -> None:
    """One step of a second among steps of 20 ms changes the factor little, and temporarily."""
    correction = Correction()
    for _ in range(100):
        correction = correction.observe(predicted_s=0.02, real_s=0.02)
    correction = correction.observe(predicted_s=0.02, real_s=1.0)
    assert correction.factor < 1.02
    for _ in range(200):
        correction = correction.observe(predicted_s=0.02, real_s=0.02)
    assert correction.factor == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_leaves_bad_samples_out(bad: float) -> None:
    """A sample that is no time changes only the number of refused samples."""
    good = Correction().observe(predicted_s=0.01, real_s=0.02)
    for correction in (good.observe(predicted_s=bad, real_s=0.01), good.observe(predicted_s=0.01, real_s=bad)):
        assert (correction.factor, correction.ratios, correction.num_refused) == (good.factor, good.ratios, 1)


@given(
    samples=st.lists(st.tuples(st.floats(), st.floats()), max_size=60),
    momentum=st.floats(0, 0.999),
    window=st.integers(1, 20),
)
def test_stays_within_its_limits(samples: list[tuple[float, float]], momentum: float, window: int) -> None:
    """For all samples, the factor is finite and within its limits, and the window has its maximum length."""
    correction = Correction(rule=CorrectionRule(momentum=momentum, window=window, lowest=0.5, highest=3.0))
    for predicted_s, real_s in samples:
        correction = correction.observe(predicted_s=predicted_s, real_s=real_s)
        assert 0.5 <= correction.factor <= 3.0
        assert len(correction.ratios) <= window


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", 1.0), ("momentum", math.nan), ("window", 0), ("lowest", 0.0), ("lowest", 2.0), ("highest", 0.5)],
)
def test_refuses_a_bad_rule(name: str, value: float) -> None:
    """A rule that does not converge is refused, and the error names the field."""
    with pytest.raises(ValueError, match=rf"^{name}: "):
        CorrectionRule(**{name: value})  # type: ignore[arg-type]


def test_wrong_chunks_do_not_change_decodes() -> None:
    """Where only chunks take longer than predicted, decodes keep their own factor."""
    correction = RegionCorrection()
    for step in range(400):
        is_chunk = step % 10 == 0
        region, real_s = (PREFILL_REGION, 0.09) if is_chunk else (DECODE_REGION, 0.02)
        correction = correction.observe(region, predicted_s=0.06 if is_chunk else 0.02, real_s=real_s)
    decode, mixed, prefill = correction.factors
    assert decode == pytest.approx(1.0, abs=1e-9)
    assert prefill == pytest.approx(1.5, rel=0.05)
    assert mixed == correction.every.factor
    assert 1.0 < mixed < prefill


def test_a_region_with_few_steps_has_the_factor_of_all() -> None:
    """Until a region has enough steps, what others show is the best guess."""
    correction = RegionCorrection()
    for _ in range(MIN_STEPS - 1):
        correction = correction.observe(PREFILL_REGION, predicted_s=1.0, real_s=2.0)
    assert set(correction.factors) == {correction.every.factor}
    correction = correction.observe(PREFILL_REGION, predicted_s=1.0, real_s=2.0)
    assert correction.factors == (correction.every.factor,) * 3
    correction = correction.observe(DECODE_REGION, predicted_s=1.0, real_s=1.0)
    assert correction.factors[DECODE_REGION] == correction.every.factor != correction.factors[PREFILL_REGION]
