"""Each rule by cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.provisioning import rule_from
from scheduler.provisioning.cold_starts import ColdStarts
from scheduler.provisioning.leaving import leavers
from scheduler.provisioning.limits import Aims, ScalingLimits
from scheduler.provisioning.load import InstanceCapacity, Load, load_of
from scheduler.provisioning.observed import Observed, Placed
from scheduler.provisioning.pool_state import PoolState
from scheduler.provisioning.schedule import peaks_from
from scheduler.provisioning.trend import Trend, trend_of

AIMS = Aims(threshold_s=70.0, cold_start_s=60.0, seats=50, target_share=0.8)
# 50 at a time for 12.5 s each: 4 requests/s an instance
LOAD = Load(tokens=100.0, tail_tokens=200.0, held_tokens=300.0, pace_s=0.075, drag_s=0.001)
DAY_S = 86400.0


def situation(**changes: object) -> PoolState:
    """Four instances that are well."""
    return PoolState(**{"now_s": 1000.0, "num_ready": 4, "cold_start_s": 60.0, "load": LOAD, **changes})


def test_preempt_asks_for_one_more_when_a_forecast_reaches_the_threshold() -> None:
    """Seventy seconds foreseen is one more; less is none."""
    rule = rule_from("preempt", AIMS)
    assert rule(situation(worst_forecast_s=70.0, worst_lately_s=70.0)).num_wanted == 5
    assert rule(situation(worst_forecast_s=69.9, worst_outcome_s=99.0, worst_lately_s=99.0)).num_wanted == 4


def test_relief_asks_for_one_more_when_a_request_took_too_long() -> None:
    """What is foreseen does not matter to it."""
    rule = rule_from("relief", AIMS)
    assert rule(situation(worst_outcome_s=70.0, worst_lately_s=70.0)).num_wanted == 5
    assert rule(situation(worst_forecast_s=99.0, worst_lately_s=99.0)).num_wanted == 4


@pytest.mark.parametrize("name", ["preempt", "relief"])
def test_the_papers_rules_are_content_with_one_less_far_below_the_threshold(name: str) -> None:
    """Between six tenths of the threshold and the threshold nothing moves."""
    rule = rule_from(name, AIMS)
    assert rule(situation(worst_lately_s=41.9)).num_enough == 3
    assert rule(situation(worst_lately_s=42.1)).num_enough == 4


def test_headroom_knows_what_an_instance_serves_from_forecasts_and_then_from_what_it_served() -> None:
    """50 seats at 12.5 s each are 4 requests/s; 400 requests in 200 s on full instances are half of it."""
    rule = rule_from("headroom", AIMS)
    assert LOAD.rate(50.0) == pytest.approx(4.0)
    assert rule(situation()).numbers["instance_bears_per_s"] == pytest.approx(4.0)
    seen = rule(situation(full_ends=400, full_s=200.0)).numbers["instance_bears_per_s"]
    assert seen == pytest.approx(2.0, rel=0.05)
    proven = rule(situation(ends=1000, ready_s=200.0)).numbers["instance_bears_per_s"]
    assert proven == pytest.approx(5.0)  # never less than it has done already


def test_headroom_starts_none_as_long_as_the_threshold_bears_the_queue() -> None:
    """Full instances take 25 s. 2 requests/s too many for 135 s make 42 s of it; 8 make 92 s, six instances 43 s."""
    rule = rule_from("headroom", AIMS)
    busy = situation(trend=Trend(level_per_s=18.0), in_flight=200)
    assert rule(busy).numbers["slowest_ahead_s"] == pytest.approx(42.0, abs=1.0)
    assert rule(busy).num_wanted == 4
    over = rule(situation(trend=Trend(level_per_s=24.0), in_flight=200))
    assert over.numbers["slowest_ahead_s"] == pytest.approx(92.0, abs=2.0)
    assert over.num_wanted == 6


def test_headroom_sees_the_queue_that_is_there() -> None:
    """What four instances would serve for ever they cannot serve beside 800 requests that wait already."""
    rule = rule_from("headroom", AIMS)
    assert rule(situation(trend=Trend(level_per_s=15.0), in_flight=200)).num_wanted == 4
    assert rule(situation(trend=Trend(level_per_s=15.0), in_flight=1000)).num_wanted > 4


def test_headroom_looks_a_cold_start_ahead() -> None:
    """8.5 requests/s that grow by 0.1 every second are 15 after 60 + 5 s, which four bear, and 39 after 300 + 5 s."""
    rule = rule_from("headroom", AIMS)
    climbing = Trend(level_per_s=8.5, slope_per_s2=0.1)
    wish = rule(situation(trend=climbing))
    assert wish.numbers["arrivals_ahead_per_s"] == pytest.approx(15.0)
    assert wish.num_wanted == 4
    assert wish.num_enough == 4  # nobody leaves while more and more come
    assert rule(situation(trend=climbing, cold_start_s=300.0)).num_wanted >= 10


def test_headroom_counts_instances_that_start_from_when_they_will_be_there() -> None:
    """Two that come in 10 s do what six would; two that come in 60 s leave a longer queue behind."""
    rule = rule_from("headroom", AIMS)
    load = {"trend": Trend(level_per_s=24.0), "in_flight": 200, "num_starting": 2}
    soon = rule(situation(**load, ready_in_s=(10.0, 10.0)))
    late = rule(situation(**load, ready_in_s=(60.0, 60.0)))
    assert soon.num_wanted == 6
    assert soon.numbers["slowest_ahead_s"] < late.numbers["slowest_ahead_s"]


def test_headroom_lets_go_only_what_it_would_not_soon_miss() -> None:
    """With a sixth more of the 10 requests/s three are enough; with three quarters more, for a long cold start, are not."""
    rule = rule_from("headroom", AIMS)
    assert rule(situation(trend=Trend(level_per_s=10.0))).num_enough == 3
    assert rule(situation(trend=Trend(level_per_s=12.0))).num_enough == 4
    assert rule(situation(trend=Trend(level_per_s=10.0), cold_start_s=300.0)).num_enough == 4
    assert rule(situation(trend=Trend(level_per_s=10.0), in_flight=1000)).num_enough == 4


def test_headroom_believes_forecasts_more_than_its_own_reckoning() -> None:
    """Forecasts beyond the threshold ask for one more, unless one is on the way already, or has just come."""
    rule = rule_from("headroom", AIMS)
    assert rule(situation(forecast_p_s=71.0, trend=Trend(level_per_s=1.0))).num_wanted == 5
    assert rule(situation(forecast_p_s=71.0, num_starting=1, trend=Trend(level_per_s=1.0))).num_wanted == 5
    just_now = situation(forecast_p_s=71.0, same_for_s=10.0, trend=Trend(level_per_s=1.0))
    assert rule(just_now).num_wanted == 4  # they are from before


def test_headroom_waits_for_no_queue_while_more_and_more_come() -> None:
    """18 requests/s that stay are borne by four and a queue; where as many are climbed to, a fifth is asked for at once."""
    rule = rule_from("headroom", AIMS)
    assert rule(situation(trend=Trend(level_per_s=18.0), in_flight=200)).num_wanted == 4
    assert rule(situation(trend=Trend(level_per_s=11.5, slope_per_s2=0.1), in_flight=200)).num_wanted == 5


def test_headroom_does_nothing_before_it_knows_anything() -> None:
    """No placement, no opinion."""
    wish = rule_from("headroom", AIMS)(situation(load=Load(), trend=Trend(level_per_s=99.0)))
    assert (wish.num_wanted, wish.num_enough) == (4, 4)


def test_schedule_starts_a_cold_start_early_and_holds_to_the_end() -> None:
    """Eight from half past seven, with 60 s of cold start and 30 s of lead."""
    rule = rule_from("schedule", AIMS, "07:30-19:00=8; 00:00-07:30=2; 19:00-24:00=2")
    start_s = 7.5 * 3600
    assert rule(situation(unix_s=start_s - 91)).num_wanted == 2
    assert rule(situation(unix_s=start_s - 89)).num_wanted == 8
    assert rule(situation(unix_s=19 * 3600 - 1)).num_wanted == 8
    assert rule(situation(unix_s=19 * 3600 + 1)).num_enough == 2


def test_schedule_knows_weekdays_and_nights() -> None:
    """1970 began on a Thursday; a night belongs to the day on which it begins."""
    (peak,) = peaks_from("thu-thu 22:00-06:00=3")
    assert peak.holds(23 * 3600)
    assert peak.holds(DAY_S + 5 * 3600)
    assert not peak.holds(DAY_S + 23 * 3600)
    assert not peak.holds(5 * 3600)


def test_schedule_sees_peaks_shorter_than_its_lead() -> None:
    """A peak of one minute within a lead of five is not overlooked."""
    rule = rule_from("schedule", AIMS, "12:00-12:01=6")
    assert rule(situation(unix_s=12 * 3600 - 200, cold_start_s=300.0)).num_wanted == 6


def test_of_several_rules_the_largest_wish_wins() -> None:
    """And all have to be content before one leaves."""
    rule = rule_from("headroom+schedule", AIMS, "00:00-24:00=7")
    wish = rule(situation(trend=Trend(level_per_s=1.0)))
    assert (wish.num_wanted, wish.num_enough) == (7, 7)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Aims(threshold_s=-1.0), "threshold_s"),
        (lambda: Aims(threshold_s=math.nan), "threshold_s"),
        (lambda: Aims(cold_start_s=901.0), "cold_start_s"),
        (lambda: Aims(cold_start_s=-1.0), "cold_start_s"),
        (lambda: Aims(quantile=1.0), "quantile"),
        (lambda: Aims(low_share=0.0), "low_share"),
        (lambda: Aims(seats=-1), "seats"),
        (lambda: ScalingLimits(min_instances=5, max_instances=4), "min_instances"),
        (lambda: ScalingLimits(max_instances=0), "max_instances"),
        (lambda: ScalingLimits(step=0), "step"),
        (lambda: ScalingLimits(cooldown_s=math.inf), "cooldown_s"),
        (lambda: ScalingLimits(calm_s=-1.0), "calm_s"),
        (lambda: ScalingLimits(min_instances=3, starts_per_h=2), "starts_per_h"),
        (lambda: ScalingLimits(starts_per_h=0), "starts_per_h"),
        (lambda: rule_from("clairvoyance", AIMS), "rule"),
        (lambda: rule_from("schedule", AIMS), "schedule"),
        (lambda: rule_from("preempt", AIMS, "07:00-08:00=1"), "schedule"),
        (lambda: peaks_from("25:00-26:00=1"), "schedule"),
        (lambda: peaks_from("foo 07:00-08:00=1"), "schedule"),
        (lambda: peaks_from("07:00=1"), "schedule"),
        (lambda: peaks_from(" ; "), "schedule"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: object, named: str) -> None:
    """One line that begins with the name of the field."""
    with pytest.raises(ValueError, match=f"^{named}: "):
        make()  # type: ignore[operator]


def test_cold_starts_are_learnt() -> None:
    """A guess holds until something was measured; patience grows with what is usual."""
    starts = ColdStarts(60.0)
    assert (starts.expected_s, starts.given_up_after_s) == (60.0, 180.0)
    for took_s in (100.0, 100.0, 100.0, 300.0):
        starts.measured(took_s)
    assert starts.expected_s == pytest.approx(150.0)
    assert starts.given_up_after_s == pytest.approx(450.0)


def test_the_one_goes_whose_loss_matters_least() -> None:
    """First what others would have missed, then what it has left to do, then the name."""
    losses = {"a": (5.0, 0.0), "b": (0.0, 9.0), "c": (0.0, 2.0), "d": (0.0, 2.0)}
    assert leavers(["a", "b", "c", "d"], losses, 3) == ("c", "d", "b")


def test_load_is_learnt_from_what_was_placed() -> None:
    """The line that made the spans comes out again, a guess aside."""
    spans = [(float(company), 0.03 + 0.0005 * company) for company in range(10, 50)]
    load = load_of(np.full(100, 50.0), np.full(100, 200.0), 0.99, spans, InstanceCapacity())
    assert load.tokens == 200.0
    assert load.held_tokens == 150.0  # the prompt, and half of the answer
    assert load.pace_s + load.drag_s * 40 == pytest.approx(0.05, rel=0.05)
    assert load.company(InstanceCapacity(kv_tokens=15_000), threshold_s=70.0, share=0.9) == pytest.approx(90.0)


@pytest.mark.parametrize(("took_s", "late"), [(4.0, 1.0), (6.0, 1.5)])
def test_load_is_as_slow_as_outcomes_say(took_s: float, late: float) -> None:
    """Forecasts know nothing of those who come later; how much longer requests take is learnt from those that ended."""
    observed = Observed(AIMS, ScalingLimits())
    for number in range(400):
        now_s = number * 0.1
        observed.placed(now_s, Placed(
            request_id=str(number), instance_id="i", prompt_tokens=10, output_tokens=100, e2e_s=4.0,
        ))  # fmt: skip
        observed.ended(now_s, str(number), took_s)
    load = observed.situation(60.0, num_ready=1, num_starting=0).load
    assert load.pace_s + load.drag_s == pytest.approx(0.04 * late, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.5, 4.0, 40.0])
def test_noise_is_no_trend(seed: int, rate: float) -> None:
    """Poisson counts of a constant rate hardly ever look like anything else."""
    counts = np.random.default_rng(seed).poisson(rate * 5.0, 48).astype(float)
    trend = trend_of(counts, 5.0)
    assert trend.slope_per_s2 == pytest.approx(0.0, abs=rate / 1000)
    assert trend.level_per_s == pytest.approx(rate, rel=0.5)


def test_a_step_is_no_ramp_and_a_ramp_no_step() -> None:
    """After a jump the level is the new one, and it is not thought to go on; what climbs is."""
    draws = np.random.default_rng(1)
    jumped = trend_of(np.concatenate([draws.poisson(60.0, 40), draws.poisson(120.0, 4)]).astype(float), 5.0)
    assert jumped.slope_per_s2 == 0.0
    assert jumped.level_per_s == pytest.approx(24.0, rel=0.1)
    climbing = trend_of(draws.poisson(np.linspace(60.0, 180.0, 48)).astype(float), 5.0)
    assert climbing.slope_per_s2 == pytest.approx(0.1, rel=0.3)
    assert climbing.safe(60.0) > climbing.at(60.0) > climbing.level_per_s
