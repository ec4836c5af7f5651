"""The accuracy of a profile on windows whose truth is known, and its recalibration."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from predictor.config import CONSUMER, PRODUCER
from predictor.profile import Transit
from predictor.request import DECODE, PREFILL
from predictor.snapshot_of_engine import snapshot_of
from simulator.accuracy.accuracy import accuracy_of, verdict
from simulator.accuracy.accuracy_report import as_html, as_json, as_text
from simulator.accuracy.online_correction import corrected
from simulator.accuracy.recalibration import FACTOR, slowed
from simulator.accuracy.replayed_window import compared_requests, forecast_times, measured_times, profile_times
from simulator.accuracy.request_errors import mean_concurrency
from simulator.accuracy.step_errors import drift_of, noise_of, pace_of, step_errors
from simulator.accuracy.window import ABORT, ObservedWindow
from simulator.replay import loaded_engine
from tests.simulator.accuracy.model_windows import (
    A30,
    CONFIG,
    from_the_middle,
    requests,
    seen_by_client,
    window_of,
    with_seconds,
)

SERVED = requests(80, rate=3.0)
TRUE = window_of(A30.step_time, SERVED)
SLOWER = window_of(slowed(A30.step_time, 1.25), SERVED)
TOLERANCE = 0.05


def test_the_true_profile_has_no_error() -> None:
    """Every number is as measured, the profile holds, and no recalibration is proposed."""
    found = accuracy_of(TRUE, A30)
    assert len(found.measured) == len(SERVED)
    for one in found.errors:
        assert (one.num, one.p90) == (pytest.approx(80, abs=2), pytest.approx(0.0, abs=1e-9)), one
    assert all(one.error == pytest.approx(0.0, abs=1e-9) for one in found.aggregates)
    assert all(one.bias == pytest.approx(0.0, abs=1e-9) for one in found.steps)
    assert found.holds(TOLERANCE) is True
    assert found.recalibration is not None
    assert found.recalibration.changes == ()
    assert found.recalibration.profile is A30


def test_a_slower_engine_is_reported_and_recalibrated() -> None:
    """A factor of all steps is found in every region; the recalibrated profile has no error on the window."""
    found = accuracy_of(SLOWER, A30)
    assert found.holds(TOLERANCE) is False
    assert "-20.0 %" in verdict(found, TOLERANCE)
    assert all(one.bias == pytest.approx(-0.2, abs=1e-4) for one in found.steps)
    assert {one.phase for one in found.steps} >= {"all", "mixed", "decode"}
    assert found.error_of["tpot"].bias < -0.19
    change = found.recalibration
    assert change is not None
    (factor,) = change.changes
    assert (factor.name, factor.change) == (FACTOR, pytest.approx(0.25, abs=1e-3))
    assert factor.low <= factor.change <= factor.high < 0.26
    assert change.error_after < 0.01 < change.error_before
    assert all(one.median < 0.01 for one in found.recalibrated or ())
    again = accuracy_of(SLOWER, change.profile)
    assert again.holds(TOLERANCE) is True
    assert again.recalibration is not None
    assert again.recalibration.changes == ()


def test_a_constant_is_told_from_a_scale() -> None:
    """Where every step takes 4 ms more, a factor would be wrong for large batches."""
    found = accuracy_of(window_of(replace(A30.step_time, constant_s=A30.step_time.constant_s + 0.004), SERVED), A30)
    assert found.recalibration is not None
    (change,) = found.recalibration.changes
    assert (change.name, change.change) == ("constant_s", pytest.approx(0.004, rel=0.02))
    assert all(one.median < 0.01 for one in found.recalibrated or ())


def test_requests_alone_show_the_same_factor() -> None:
    """What a client sees suffices, with the time to the engine and back taken from the profile."""
    transit = Transit(inward_s=0.004, outward_s=0.003)
    profile = replace(A30, transit=transit)
    window = seen_by_client(SLOWER, transit)
    found = accuracy_of(window, profile)
    assert (found.steps, found.with_pace, found.outside) == ([], None, None)
    assert found.holds(TOLERANCE) is False
    assert found.recalibration is not None
    (factor,) = found.recalibration.changes
    assert (factor.name, factor.change) == (FACTOR, pytest.approx(0.25, abs=0.01))
    exact = profile_times(window, compared_requests(window), replace(profile, step_time=slowed(A30.step_time, 1.25)))
    np.testing.assert_allclose(exact.ttft_s, measured_times(compared_requests(window)).ttft_s, atol=1e-6)


def test_a_window_that_begins_in_the_middle_is_replayed_from_the_engines_state() -> None:
    """The requests that ran then have their true lengths, and those that come later their exact times."""
    engine = loaded_engine(CONFIG, A30.step_time, SERVED)
    while engine.now_s < 8.0:
        engine.next_step()
    state = snapshot_of(engine, engine.now_s)
    state = replace(state, reserved=())  # those that have not arrived yet
    assert len(state.running) > 2
    window = from_the_middle(TRUE, state)
    late = compared_requests(window)
    assert 10 < len(late) < len(SERVED) - 10
    np.testing.assert_allclose(profile_times(window, late, A30).e2e_s, measured_times(late).e2e_s, rtol=0, atol=1e-6)


def test_a_forecast_at_arrival_knows_no_later_arrivals() -> None:
    """While nothing arrives later it is the replay; else a lower bound, as later requests only slow a request down."""
    late = compared_requests(TRUE)
    forecast, measured = forecast_times(TRUE, late, A30.step_time), measured_times(late)
    assert (forecast.e2e_s <= measured.e2e_s + 1e-6).all()
    assert np.median(forecast.e2e_s / measured.e2e_s) < 0.999
    assert forecast.e2e_s[-1] == pytest.approx(measured.e2e_s[-1], abs=1e-6)
    better = corrected(forecast, measured)
    assert better.e2e_s[0] == forecast.e2e_s[0]  # nothing has ended by then
    before, after = (np.median(np.abs(times.e2e_s / measured.e2e_s - 1)[20:]) for times in (forecast, better))
    assert after < before
    assert corrected(measured, measured).e2e_s == pytest.approx(measured.e2e_s)


def test_requests_that_did_not_end_by_themselves_are_served_but_not_compared() -> None:
    """An aborted request takes part until then; one that goes on at the end of the window takes part to the last."""
    first, second, *others = TRUE.requests
    aborted = replace(first, ended=ABORT, last_token_s=first.first_token_s)
    going_on = replace(
        second, ended="", last_token_s=None, facts=replace(second.facts, output_tokens=1, max_tokens=500)
    )
    window = replace(TRUE, requests=(aborted, going_on, *others))
    found = accuracy_of(window, A30, recalibrates=False)
    assert len(found.measured) == len(SERVED) - 2
    assert found.errors[0].median < 0.2


@pytest.mark.parametrize(("leg", "role"), [(PREFILL, PRODUCER), (DECODE, CONSUMER)])
def test_legs_of_requests_are_replayed_as_such(leg: str, role: str) -> None:
    """A prefill leg ends with its first token; a decode leg fetches for as long as was observed."""
    config = replace(CONFIG, kv_role=role, kv_lease_s=2.0, kv_bytes_per_token=1000)
    served = [replace(one, leg=leg, transfer_s=0.03 if leg == DECODE else None) for one in SERVED[:40]]
    served = [replace(one, output_tokens=1) if leg == PREFILL else one for one in served]
    found = accuracy_of(window_of(A30.step_time, served, config), A30, recalibrates=False)
    assert len(found.measured) == 40
    assert found.error_of["e2e"].p90 == pytest.approx(0.0, abs=1e-9)
    slower = window_of(slowed(A30.step_time, 1.3), served, config)
    assert accuracy_of(slower, A30, recalibrates=False).error_of["e2e"].bias < -0.1


def test_nothing_to_compare_gives_no_verdict() -> None:
    """An idle engine is neither right nor wrong."""
    window = replace(TRUE, requests=(), steps=TRUE.steps.where(np.zeros(len(TRUE.steps), bool)))
    found = accuracy_of(window, A30)
    assert found.holds(TOLERANCE) is None
    assert "too short" in "\n".join(as_text(found, TOLERANCE))
    json.dumps(as_json(found, TOLERANCE), allow_nan=False)


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_the_noise_of_steps_is_told_from_drift_and_bias(sigma: float) -> None:
    """Independent noise of single steps is noise, a slow change is drift, and neither is bias."""
    draw = np.random.default_rng(3)
    steps = TRUE.steps
    num = len(steps)
    noisy = with_seconds(steps, steps.columns.seconds * np.exp(sigma * draw.standard_normal(num)))
    ratio = noisy.columns.seconds / steps.columns.seconds
    noise = noise_of(noisy, ratio)
    assert noise == pytest.approx(0.6745 * sigma, rel=0.2)
    assert drift_of(ratio, noise) < 0.35 * sigma
    drifting = ratio * np.exp(0.2 * np.sin(np.arange(num) * 8 * np.pi / num))
    assert drift_of(drifting, noise) == pytest.approx(0.2 / 2**0.5, rel=0.3)
    whole = step_errors(noisy, A30.step_time)[0]
    assert abs(whole.bias) < 3 * whole.half + 0.01


def test_the_measured_pace_explains_a_change_in_the_middle() -> None:
    """A machine that is slower for a while: with the pace of each moment, requests are right again."""
    half = len(TRUE.steps) // 2
    pace_at = pace_of(
        with_seconds(TRUE.steps, TRUE.steps.columns.seconds * np.repeat([1.0, 2.0], [half, len(TRUE.steps) - half])),
        A30.step_time,
    )
    assert pace_at(0.0) == pytest.approx(1.0)
    assert pace_at(TRUE.header.end_s) == pytest.approx(2.0)
    found = accuracy_of(SLOWER, A30, recalibrates=False)
    assert found.with_pace is not None
    assert all(one.median < 0.02 for one in found.with_pace)


def test_concurrency_is_the_mean_number_in_progress() -> None:
    """Compared with counting at many moments."""
    times = measured_times(compared_requests(TRUE))
    found = mean_concurrency(times)
    for place in (0, 20, 79):
        moments = np.linspace(times.arrival_s[place], times.end_s[place], 4001)
        counts = [np.count_nonzero((times.arrival_s <= at_s) & (times.end_s > at_s)) for at_s in moments]
        assert found[place] == pytest.approx(np.mean(counts), rel=0.01)


def other_settings(window: ObservedWindow) -> ObservedWindow:
    """The window as if the engine had half the sequences."""
    return window.with_engine(replace(CONFIG, max_num_seqs=6))


def test_other_settings_of_the_engine_change_the_replay() -> None:
    """With fewer sequences, requests wait longer."""
    found = accuracy_of(other_settings(TRUE), A30, recalibrates=False)
    by_name = {one.name: one for one in found.aggregates}
    assert by_name["ttft_s.mean"].error > 0.5


def test_reports_have_all_parts_and_need_no_other_file() -> None:
    """The text, the JSON and the page name each quantity, phase and region."""
    found = accuracy_of(SLOWER, A30)
    report = as_json(found, TOLERANCE)
    json.dumps(report, allow_nan=False)
    assert report["holds"] is False
    assert set(report["aggregates"]) >= {"ttft_s.mean", "tpot_s.p50", "e2e_s.p90", "e2e_s.p99", "requests_per_s"}
    assert set(report["phases"]) == {"queue", "prefill", "decode"}
    assert report["steps"]["decode 9-16"]["bias"] == pytest.approx(-0.2, abs=1e-3)
    assert report["recalibration"]["held_out_error"]["after"] < report["recalibration"]["held_out_error"]["before"]
    text, page = "\n".join(as_text(found, TOLERANCE)), as_html(found, TOLERANCE)
    for part in ("recalibrated", "output tokens per s", "mixed", "decode 9-16", "does not hold"):
        assert part in text
        assert part in page
    assert page.count("<svg") == 4
    for outside in ("src=", "href=", "@import", "<script"):
        assert outside not in page
