"""Provisioning rules on cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.provisioning import rule_from
from scheduler.provisioning.cold_starts import ColdStarts
from scheduler.provisioning.history import PlacedRequest, PoolHistory
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.load import InstanceCapacity, LoadModel, load_model_of
from scheduler.provisioning.planner import instances_to_drain
from scheduler.provisioning.pool_state import PoolState, TierNeeds
from scheduler.provisioning.schedule import parse_schedule
from scheduler.provisioning.trend import Trend, trend_of

OBJECTIVES = ScalingObjectives(threshold_s=70.0, cold_start_s=60.0, seats=50, target_share=0.8)
# 50 concurrent requests of 12.5 s each: 4 requests/s per instance
LOAD = LoadModel(tokens=100.0, tail_tokens=200.0, held_tokens=300.0, token_s=0.075, slowdown_s=0.001)
DAY_S = 86400.0


def pool_state(**changes: object) -> PoolState:
    """Return the state of four healthy instances."""
    return PoolState(**{"now_s": 1000.0, "num_ready": 4, "cold_start_s": 60.0, "load": LOAD, **changes})


def test_preempt_wants_one_more_when_a_forecast_reaches_the_threshold() -> None:
    """A forecast of 70 s adds one instance; lower ones add none."""
    rule = rule_from("preempt", OBJECTIVES)
    assert rule(pool_state(worst_forecast_s=70.0, worst_recent_s=70.0)).num_wanted == 5
    assert rule(pool_state(worst_forecast_s=69.9, worst_outcome_s=99.0, worst_recent_s=99.0)).num_wanted == 4


def test_relief_wants_one_more_when_a_latency_reaches_the_threshold() -> None:
    """It ignores forecasts."""
    rule = rule_from("relief", OBJECTIVES)
    assert rule(pool_state(worst_outcome_s=70.0, worst_recent_s=70.0)).num_wanted == 5
    assert rule(pool_state(worst_forecast_s=99.0, worst_recent_s=99.0)).num_wanted == 4


@pytest.mark.parametrize("name", ["preempt", "relief"])
def test_the_rules_of_the_paper_allow_one_less_far_below_the_threshold(name: str) -> None:
    """Between low_share of the threshold and the threshold there is no change."""
    rule = rule_from(name, OBJECTIVES)
    assert rule(pool_state(worst_recent_s=41.9)).num_enough == 3
    assert rule(pool_state(worst_recent_s=42.1)).num_enough == 4


def test_headroom_reads_capacity_from_forecasts_and_then_from_throughput() -> None:
    """50 seats at 12.5 s each are 4 requests/s; 400 requests in 200 s on full instances are half of that."""
    rule = rule_from("headroom", OBJECTIVES)
    assert LOAD.requests_per_s(50.0) == pytest.approx(4.0)
    assert rule(pool_state()).numbers["instance_bears_per_s"] == pytest.approx(4.0)
    measured = rule(pool_state(num_ended_full=400, full_instance_s=200.0)).numbers["instance_bears_per_s"]
    assert measured == pytest.approx(2.0, rel=0.05)
    proven = rule(pool_state(num_ended=1000, ready_instance_s=200.0)).numbers["instance_bears_per_s"]
    assert proven == pytest.approx(5.0)  # at least the throughput of all instances


def test_headroom_starts_none_while_the_queue_stays_within_the_threshold() -> None:
    """Full instances take 25 s. An excess of 2 requests/s for 135 s makes it 42 s, of 8 92 s, with six instances 43 s."""
    rule = rule_from("headroom", OBJECTIVES)
    busy = pool_state(trend=Trend(level_per_s=18.0), in_flight=200)
    assert rule(busy).numbers["slowest_ahead_s"] == pytest.approx(42.0, abs=1.0)
    assert rule(busy).num_wanted == 4
    over = rule(pool_state(trend=Trend(level_per_s=24.0), in_flight=200))
    assert over.numbers["slowest_ahead_s"] == pytest.approx(92.0, abs=2.0)
    assert over.num_wanted == 6


def test_headroom_counts_requests_in_flight() -> None:
    """Four instances can serve the arrivals, but not in addition to 800 waiting requests."""
    rule = rule_from("headroom", OBJECTIVES)
    assert rule(pool_state(trend=Trend(level_per_s=15.0), in_flight=200)).num_wanted == 4
    assert rule(pool_state(trend=Trend(level_per_s=15.0), in_flight=1000)).num_wanted > 4


def test_headroom_plans_for_a_cold_start_ahead() -> None:
    """8.5 requests/s that grow by 0.1 per second are 15 after 60 + 5 s, enough for four, and 39 after 300 + 5 s."""
    rule = rule_from("headroom", OBJECTIVES)
    climbing = Trend(level_per_s=8.5, slope_per_s2=0.1)
    target = rule(pool_state(trend=climbing))
    assert target.numbers["arrivals_ahead_per_s"] == pytest.approx(15.0)
    assert target.num_wanted == 4
    assert target.num_enough == 4  # no shrinking while arrivals grow
    assert rule(pool_state(trend=climbing, cold_start_s=300.0)).num_wanted >= 10


def test_headroom_counts_starting_instances_from_when_they_are_ready() -> None:
    """Two that are ready in 10 s are nearly as good as ready ones; two that are ready in 60 s leave a longer queue."""
    rule = rule_from("headroom", OBJECTIVES)
    load = {"trend": Trend(level_per_s=24.0), "in_flight": 200, "num_starting": 2}
    soon = rule(pool_state(**load, ready_in_s=(10.0, 10.0)))
    late = rule(pool_state(**load, ready_in_s=(60.0, 60.0)))
    assert soon.num_wanted == 6
    assert soon.numbers["slowest_ahead_s"] < late.numbers["slowest_ahead_s"]


def test_headroom_keeps_spare_capacity_when_it_shrinks() -> None:
    """Three serve 10 requests/s with 15 % to spare, but not with the spare capacity for a long cold start."""
    rule = rule_from("headroom", OBJECTIVES)
    assert rule(pool_state(trend=Trend(level_per_s=10.0))).num_enough == 3
    assert rule(pool_state(trend=Trend(level_per_s=12.0))).num_enough == 4
    assert rule(pool_state(trend=Trend(level_per_s=10.0), cold_start_s=300.0)).num_enough == 4
    assert rule(pool_state(trend=Trend(level_per_s=10.0), in_flight=1000)).num_enough == 4


def test_headroom_grows_when_forecasts_exceed_the_threshold() -> None:
    """Forecasts above the threshold add one, unless one is starting or has just become ready."""
    rule = rule_from("headroom", OBJECTIVES)
    assert rule(pool_state(forecast_p_s=71.0, trend=Trend(level_per_s=1.0))).num_wanted == 5
    assert rule(pool_state(forecast_p_s=71.0, num_starting=1, trend=Trend(level_per_s=1.0))).num_wanted == 5
    just_now = pool_state(forecast_p_s=71.0, since_growth_s=10.0, trend=Trend(level_per_s=1.0))
    assert rule(just_now).num_wanted == 4  # these forecasts are older


def test_headroom_does_not_wait_for_a_queue_while_arrivals_grow() -> None:
    """Four serve constant 18 requests/s with a queue; if arrivals grow to 18 requests/s a fifth is started at once."""
    rule = rule_from("headroom", OBJECTIVES)
    assert rule(pool_state(trend=Trend(level_per_s=18.0), in_flight=200)).num_wanted == 4
    assert rule(pool_state(trend=Trend(level_per_s=11.5, slope_per_s2=0.1), in_flight=200)).num_wanted == 5


def test_headroom_does_nothing_before_the_first_placement() -> None:
    """Without a load model the number of instances stays."""
    target = rule_from("headroom", OBJECTIVES)(pool_state(load=LoadModel(), trend=Trend(level_per_s=99.0)))
    assert (target.num_wanted, target.num_enough) == (4, 4)


def test_schedule_starts_a_cold_start_early_and_keeps_instances_to_the_end() -> None:
    """Eight from 07:30, with a cold start of 60 s and a lead of 30 s."""
    rule = rule_from("schedule", OBJECTIVES, "07:30-19:00=8; 00:00-07:30=2; 19:00-24:00=2")
    start_s = 7.5 * 3600
    assert rule(pool_state(unix_s=start_s - 91)).num_wanted == 2
    assert rule(pool_state(unix_s=start_s - 89)).num_wanted == 8
    assert rule(pool_state(unix_s=19 * 3600 - 1)).num_wanted == 8
    assert rule(pool_state(unix_s=19 * 3600 + 1)).num_enough == 2


def test_schedule_has_weekdays_and_periods_past_midnight() -> None:
    """1970 began on a Thursday; a period past midnight belongs to the weekday on which it starts."""
    (period,) = parse_schedule("thu-thu 22:00-06:00=3")
    assert period.includes(23 * 3600)
    assert period.includes(DAY_S + 5 * 3600)
    assert not period.includes(DAY_S + 23 * 3600)
    assert not period.includes(5 * 3600)


def test_schedule_includes_periods_shorter_than_its_lead() -> None:
    """A period of one minute within a lead of five minutes counts."""
    rule = rule_from("schedule", OBJECTIVES, "12:00-12:01=6")
    assert rule(pool_state(unix_s=12 * 3600 - 200, cold_start_s=300.0)).num_wanted == 6


def test_tiers_add_what_is_missing_and_let_idle_instances_of_the_pool_leave() -> None:
    """Instances that start already count; without tiers the rule changes nothing."""
    rule = rule_from("tiers", OBJECTIVES)
    lacking = rule(pool_state(num_ready=3, num_starting=1, tiers=TierNeeds(num_unmet=3)))
    assert (lacking.num_wanted, lacking.num_enough) == (6, 6)
    starting = rule(pool_state(num_ready=3, num_starting=2, tiers=TierNeeds(num_unmet=1)))
    assert starting.num_wanted == 5
    idle = rule(pool_state(num_ready=3, num_starting=0, tiers=TierNeeds(idle=("a", "b"))))
    assert (idle.num_wanted, idle.num_enough) == (3, 1)
    none = rule(pool_state(num_ready=3, num_starting=0))
    assert (none.num_wanted, none.num_enough) == (3, 3)


def test_of_several_rules_the_largest_wish_wins() -> None:
    """All rules have to allow shrinking."""
    rule = rule_from("headroom+schedule", OBJECTIVES, "00:00-24:00=7")
    target = rule(pool_state(trend=Trend(level_per_s=1.0)))
    assert (target.num_wanted, target.num_enough) == (7, 7)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ScalingObjectives(threshold_s=-1.0), "threshold_s"),
        (lambda: ScalingObjectives(threshold_s=math.nan), "threshold_s"),
        (lambda: ScalingObjectives(cold_start_s=901.0), "cold_start_s"),
        (lambda: ScalingObjectives(cold_start_s=-1.0), "cold_start_s"),
        (lambda: ScalingObjectives(quantile=1.0), "quantile"),
        (lambda: ScalingObjectives(low_share=0.0), "low_share"),
        (lambda: ScalingObjectives(seats=-1), "seats"),
        (lambda: ScalingLimits(min_instances=5, max_instances=4), "min_instances"),
        (lambda: ScalingLimits(max_instances=0), "max_instances"),
        (lambda: ScalingLimits(step=0), "step"),
        (lambda: ScalingLimits(cooldown_s=math.inf), "cooldown_s"),
        (lambda: ScalingLimits(calm_s=-1.0), "calm_s"),
        (lambda: ScalingLimits(min_instances=3, starts_per_h=2), "starts_per_h"),
        (lambda: ScalingLimits(starts_per_h=0), "starts_per_h"),
        (lambda: rule_from("clairvoyance", OBJECTIVES), "rule"),
        (lambda: rule_from("schedule", OBJECTIVES), "schedule"),
        (lambda: rule_from("preempt", OBJECTIVES, "07:00-08:00=1"), "schedule"),
        (lambda: parse_schedule("25:00-26:00=1"), "schedule"),
        (lambda: parse_schedule("foo 07:00-08:00=1"), "schedule"),
        (lambda: parse_schedule("07:00=1"), "schedule"),
        (lambda: parse_schedule(" ; "), "schedule"),
    ],
)
def test_invalid_settings_are_refused_by_name(make: object, named: str) -> None:
    """The error begins with the name of the field."""
    with pytest.raises(ValueError, match=f"^{named}: "):
        make()  # type: ignore[operator]


def test_cold_starts_are_learned() -> None:
    """The setting holds until the first measurement; the time-out grows with the measurements."""
    starts = ColdStarts(60.0)
    assert (starts.predicted_s, starts.given_up_after_s) == (60.0, 180.0)
    for cold_start_s in (100.0, 100.0, 100.0, 300.0):
        starts.measured(cold_start_s)
    assert starts.predicted_s == pytest.approx(150.0)
    assert starts.given_up_after_s == pytest.approx(450.0)


def test_instances_to_drain_are_ordered_by_cost() -> None:
    """First by added latency, then by remaining time, then by id."""
    costs = {"a": (5.0, 0.0), "b": (0.0, 9.0), "c": (0.0, 2.0), "d": (0.0, 2.0)}
    assert instances_to_drain(["a", "b", "c", "d"], costs, 3) == ("c", "d", "b")


def test_the_load_model_is_fitted_to_placements() -> None:
    """The fit finds the line that the periods are from, up to the prior."""
    periods = [(float(concurrency), 0.03 + 0.0005 * concurrency) for concurrency in range(10, 50)]
    load = load_model_of(np.full(100, 50.0), np.full(100, 200.0), 0.99, periods, InstanceCapacity())
    assert load.tokens == 200.0
    assert load.held_tokens == 150.0  # the prompt, and half of the answer
    assert load.token_s + load.slowdown_s * 40 == pytest.approx(0.05, rel=0.05)
    assert load.max_concurrency(InstanceCapacity(kv_tokens=15_000), threshold_s=70.0, share=0.9) == pytest.approx(90.0)


@pytest.mark.parametrize(("actual_s", "lateness"), [(4.0, 1.0), (6.0, 1.5)])
def test_the_load_model_is_corrected_by_outcomes(actual_s: float, lateness: float) -> None:
    """Forecasts do not know later arrivals; the ratio of actual to predicted latency is learned from outcomes."""
    history = PoolHistory(OBJECTIVES, ScalingLimits())
    for number in range(400):
        now_s = number * 0.1
        history.add_placement(now_s, PlacedRequest(
            request_id=str(number), instance_id="i", prompt_tokens=10, output_tokens=100, e2e_s=4.0,
        ))  # fmt: skip
        history.add_end(now_s, str(number), actual_s)
    load = history.state(60.0, num_ready=1, num_starting=0).load
    assert load.token_s + load.slowdown_s == pytest.approx(0.04 * lateness, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.5, 4.0, 40.0])
def test_noise_is_no_trend(seed: int, rate: float) -> None:
    """Poisson counts of a constant rate are fitted by a constant."""
    counts = np.random.default_rng(seed).poisson(rate * 5.0, 48).astype(float)
    trend = trend_of(counts, 5.0)
    assert trend.slope_per_s2 == pytest.approx(0.0, abs=rate / 1000)
    assert trend.level_per_s == pytest.approx(rate, rel=0.5)


def test_steps_and_lines_are_distinguished() -> None:
    """After a step the rate is the new one and constant; a line goes on."""
    draws = np.random.default_rng(1)
    stepped = trend_of(np.concatenate([draws.poisson(60.0, 40), draws.poisson(120.0, 4)]).astype(float), 5.0)
    assert stepped.slope_per_s2 == 0.0
    assert stepped.level_per_s == pytest.approx(24.0, rel=0.1)
    climbing = trend_of(draws.poisson(np.linspace(60.0, 180.0, 48)).astype(float), 5.0)
    assert climbing.slope_per_s2 == pytest.approx(0.1, rel=0.3)
    assert climbing.cautious(60.0) > climbing.at(60.0) > climbing.level_per_s
