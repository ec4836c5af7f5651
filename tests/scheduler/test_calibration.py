"""Forecasts that turn out too short are lengthened by as much, each length by its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast_result import Forecast
from scheduler.calibration import MIN_OUTCOMES, Calibration

FORETOLD = Forecast(
    request_id="r", ttft_s=0.2, e2e_s=8.2, tpot_s=0.1, queue_s=0.1, output_tokens=81, num_preemptions=0,
    prefix_hit_tokens=0,
)  # fmt: skip
SHORT = replace(FORETOLD, e2e_s=0.7)


def test_nothing_is_corrected_before_enough_is_known() -> None:
    """The first outcomes may be anything."""
    calibration = Calibration()
    for _ in range(MIN_OUTCOMES - 1):
        calibration.observe(FORETOLD, 0.4, 10.0)
    assert calibration.corrected(FORETOLD) == FORETOLD
    calibration.observe(FORETOLD, 0.4, 10.0)
    assert calibration.corrected(FORETOLD).ttft_s == pytest.approx(0.4)


def test_long_answers_are_stretched_by_what_long_ones_were() -> None:
    """A quarter more for long ones, nothing for short ones; where there is no experience, the mean of all."""
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(FORETOLD, 0.2, 10.2)
        calibration.observe(SHORT, 0.2, 0.7)
    corrected = calibration.corrected(FORETOLD)
    assert corrected.e2e_s == pytest.approx(10.2)
    assert corrected.tpot_s == pytest.approx(0.125)
    assert calibration.corrected(SHORT).e2e_s == pytest.approx(0.7)
    unknown = calibration.corrected(replace(FORETOLD, e2e_s=100.2))
    assert 100.2 < unknown.e2e_s < 125.2


def test_what_changes_is_followed() -> None:
    """After a while only the new traffic counts."""
    calibration = Calibration()
    for factor in (2.0, 1.0):
        for _ in range(200):
            calibration.observe(FORETOLD, 0.2, 0.2 + 8.0 * factor)
    assert calibration.corrected(FORETOLD).e2e_s == pytest.approx(8.2, rel=0.01)


def test_what_an_instances_pace_makes_up_for_is_not_made_up_for_again() -> None:
    """Where steps took twice as long as foretold, and are foretold so by now, later forecasts need no correction."""
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(FORETOLD, 0.4, 16.4, pace=2.0)
    assert calibration.corrected(FORETOLD).e2e_s == pytest.approx(8.2)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=30))
def test_no_outcome_makes_a_forecast_senseless(outcomes: list[tuple[float, float, float, float]]) -> None:
    """Whatever is observed, times stay in order and finite."""
    calibration = Calibration()
    for ttft_s, e2e_s, foretold_ttft_s, more_s in outcomes:
        foretold = replace(FORETOLD, ttft_s=foretold_ttft_s, e2e_s=foretold_ttft_s + more_s)
        calibration.observe(foretold, ttft_s, e2e_s)
    corrected = calibration.corrected(FORETOLD)
    assert 0 <= corrected.queue_s <= corrected.ttft_s <= corrected.e2e_s < math.inf
    endless = replace(FORETOLD, e2e_s=math.inf, tpot_s=math.inf)
    assert calibration.corrected(endless) == endless
