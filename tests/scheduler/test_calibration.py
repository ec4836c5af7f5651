"""Forecasts that prove too short are lengthened: first tokens by a difference, decodes by a ratio."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast_result import Forecast
from scheduler.calibration import DECAY, MIN_OUTCOMES, PRIOR_OUTCOMES, Calibration, DurationRatio

PREDICTED = Forecast(
    request_id="r", ttft_s=0.2, e2e_s=8.2, tpot_s=0.1, queue_s=0.1, output_tokens=81, num_preemptions=0,
    prefix_hit_tokens=0,
)  # fmt: skip
SHORT = replace(PREDICTED, e2e_s=0.7, output_tokens=6)


def test_nothing_is_corrected_before_enough_is_known() -> None:
    """The first outcomes may be anything."""
    calibration = Calibration()
    for _ in range(MIN_OUTCOMES - 1):
        calibration.observe(PREDICTED, 0.4, 10.0)
    assert calibration.corrected(PREDICTED) == PREDICTED
    calibration.observe(PREDICTED, 0.4, 10.0)
    assert calibration.corrected(PREDICTED).ttft_s == pytest.approx(0.4)


def test_first_tokens_are_late_by_a_difference() -> None:
    """What is learned from requests that do not wait holds for those that do; single outliers have no effect."""
    calibration = Calibration()
    for number in range(60):
        calibration.observe(replace(PREDICTED, ttft_s=0.01), 3.0 if number % 10 == 0 else 0.02, None)
    assert calibration.corrected(PREDICTED).ttft_s == pytest.approx(0.21)
    assert calibration.corrected(replace(PREDICTED, ttft_s=0.05)).ttft_s == pytest.approx(0.06)


def test_a_corrected_time_is_at_least_a_quarter_of_the_predicted_one() -> None:
    """Where predictions were much too long."""
    calibration = Calibration()
    for _ in range(MIN_OUTCOMES):
        calibration.observe(PREDICTED, 0.05, None)
    assert calibration.corrected(replace(PREDICTED, ttft_s=0.1)).ttft_s == pytest.approx(0.025)


def test_long_responses_are_stretched_by_what_long_ones_were() -> None:
    """A quarter more for long ones, nothing for short ones; beyond what was seen, hardly more."""
    calibration = Calibration()
    for _ in range(300):
        calibration.observe(PREDICTED, 0.2, 10.2)
        calibration.observe(SHORT, 0.2, 0.7)
    corrected = calibration.corrected(PREDICTED)
    assert corrected.e2e_s == pytest.approx(10.2, rel=0.02)
    assert corrected.tpot_s == pytest.approx(0.125, rel=0.02)
    assert calibration.corrected(SHORT).e2e_s == pytest.approx(0.7, rel=0.02)
    unknown = calibration.corrected(replace(PREDICTED, e2e_s=1000.2, output_tokens=10001))
    assert 1100 < unknown.e2e_s < 1500


def test_responses_that_begin_at_low_load_are_stretched_more() -> None:
    """The load of an engine returns to its mean: fast tokens become slower, slow ones faster."""
    calibration, generator = Calibration(), random.Random(1)
    for _ in range(600):
        tpot_s = generator.uniform(0.01, 0.03)
        tokens = generator.randint(20, 400)
        one = replace(PREDICTED, e2e_s=0.2 + tpot_s * (tokens - 1), output_tokens=tokens, tpot_s=tpot_s)
        calibration.observe(one, 0.2, 0.2 + math.sqrt(tpot_s * 0.02) * (tokens - 1))
    for tpot_s in (0.012, 0.02, 0.028):
        one = replace(PREDICTED, e2e_s=0.2 + tpot_s * 100, output_tokens=101, tpot_s=tpot_s)
        assert calibration.corrected(one).tpot_s == pytest.approx(math.sqrt(tpot_s * 0.02), rel=0.05)


def test_the_fit_is_that_of_weighted_least_squares() -> None:
    """Of all outcomes at once, with a prior of no correction."""
    ratio, generator, outcomes = DurationRatio(), random.Random(2), []
    for _ in range(50):
        tokens, predicted_s = generator.randint(2, 300), generator.uniform(0.1, 9.0)
        outcomes.append((predicted_s, predicted_s * generator.uniform(0.7, 1.5), tokens))
        ratio.observe(*outcomes[-1])
    predicted_s, actual_s, tokens = np.array(outcomes).T
    features = np.stack([np.log(predicted_s), np.log(predicted_s / (tokens - 1))])
    weights = DECAY ** np.arange(49, -1, -1)
    target = np.log(actual_s / predicted_s)
    centred = features - np.average(features, axis=1, weights=weights)[:, None]
    mean = np.average(target, weights=weights)
    slopes = np.linalg.solve(
        (weights * centred) @ centred.T + PRIOR_OUTCOMES * np.eye(2), (weights * centred) @ (target - mean)
    )
    assert [ratio.slope_a, ratio.slope_b] == pytest.approx(slopes.tolist())
    shrunk = mean * weights.sum() / (weights.sum() + PRIOR_OUTCOMES)
    expected = np.exp(shrunk + slopes @ centred[:, 7])
    assert ratio.factor(predicted_s[7], int(tokens[7])) == pytest.approx(expected)


def test_what_changes_is_followed() -> None:
    """After a while only the new traffic counts."""
    calibration = Calibration()
    for factor in (2.0, 1.0):
        for _ in range(500):
            calibration.observe(PREDICTED, 0.2, 0.2 + 8.0 * factor)
    assert calibration.corrected(PREDICTED).e2e_s == pytest.approx(8.2, rel=0.01)


def test_what_an_instances_pace_corrects_is_not_corrected_again() -> None:
    """Where steps took twice as long as predicted, and are predicted so by now, later forecasts need no correction."""
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(PREDICTED, 0.4, 16.4, pace=2.0)
    assert calibration.corrected(PREDICTED).e2e_s == pytest.approx(8.2)


@given(
    st.lists(
        st.tuples(st.floats(), st.floats(), st.floats(0.0, 1e6), st.floats(0.0, 1e6), st.integers(0, 10**6)),
        max_size=30,
    )
)
def test_no_outcome_makes_a_forecast_senseless(outcomes: list[tuple[float, float, float, float, int]]) -> None:
    """Whatever is observed, times stay in order and finite."""
    calibration = Calibration()
    for ttft_s, e2e_s, predicted_ttft_s, more_s, tokens in outcomes:
        predicted = replace(PREDICTED, ttft_s=predicted_ttft_s, e2e_s=predicted_ttft_s + more_s, output_tokens=tokens)
        calibration.observe(predicted, ttft_s, e2e_s)
    corrected = calibration.corrected(PREDICTED)
    assert 0 <= corrected.queue_s <= corrected.ttft_s <= corrected.e2e_s < math.inf
    endless = replace(PREDICTED, e2e_s=math.inf, tpot_s=math.inf)
    assert calibration.corrected(endless) == endless
