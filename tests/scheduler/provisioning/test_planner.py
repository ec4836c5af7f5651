"""The planner: within limits, never up and down, and early enough."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.provisioning import rule_from
from scheduler.provisioning.limits import Aims, ScalingLimits
from scheduler.provisioning.observed import Observed, Placed
from scheduler.provisioning.planner import DRAIN, NOTHING, START, Decision, Planner
from scheduler.provisioning.pool_state import PoolState, ScalingTarget
from tests.scheduler.provisioning.worlds import SEATS, World, bears, needed

AIMS = Aims(threshold_s=20.0, seats=SEATS, cold_start_s=60.0, target_share=0.8)


def fixed(wanted: int, enough: int | None = None) -> object:
    """A rule that always wants the same."""
    return lambda _: ScalingTarget(num_wanted=wanted, num_enough=wanted if enough is None else enough, why="so it is")


def planner(rule: object, **limits: object) -> Planner:
    """Plan for a pool of which nothing was heard."""
    bounds = ScalingLimits(**limits)
    return Planner(rule, bounds, Observed(Aims(cold_start_s=0.0), bounds))


def names(num: int) -> list[str]:
    """Some instances."""
    return [f"i{number}" for number in range(num)]


def test_no_more_than_a_step_and_no_more_than_the_most() -> None:
    """Nine wanted from two: four at once, then the rest up to the most."""
    one = planner(fixed(9), max_instances=7, step=4, cooldown_s=15.0)
    first = one.plan(0.0, names(2), 0)
    assert (first.kind, first.num, first.num_desired) == (START, 4, 6)
    one.done(0.0, first)
    assert one.plan(14.0, names(2), 4).kind == NOTHING
    second = one.plan(15.0, names(2), 4)
    assert (second.kind, second.num, second.num_desired) == (START, 1, 7)


def test_below_the_least_nothing_is_waited_for() -> None:
    """Instances that are missing are asked for whatever the rule and the cooldown say."""
    one = planner(fixed(0), min_instances=3, cooldown_s=1000.0)
    one.done(0.0, Decision(kind=START, num=1))
    assert one.plan(1.0, names(1), 0).num == 2


def test_fewer_must_have_been_enough_all_the_time() -> None:
    """One moment in which all were needed, and calm begins anew."""
    wishes = {"enough": 2}
    one = planner(lambda _: ScalingTarget(num_wanted=2, num_enough=wishes["enough"], why=""), calm_s=100.0)
    for second in range(100):
        assert one.plan(float(second), names(4), 0).kind == NOTHING
    decision = one.plan(100.0, names(4), 0)
    assert (decision.kind, decision.instance_ids) == (DRAIN, ("i0", "i1"))
    wishes["enough"] = 4
    assert one.plan(101.0, names(4), 0).kind == NOTHING
    wishes["enough"] = 2
    assert one.plan(102.0, names(4), 0).kind == NOTHING
    assert one.plan(200.5, names(4), 0).kind == NOTHING
    assert one.plan(201.5, names(4), 0).kind == DRAIN


def test_nobody_leaves_while_others_start_or_where_rules_never_shrink() -> None:
    """And what is beyond the most leaves at once."""
    one = planner(fixed(1), calm_s=0.0)
    assert one.plan(1.0, names(3), 1).kind == NOTHING
    assert planner(fixed(1), calm_s=0.0, shrink=False).plan(1.0, names(3), 0).kind == NOTHING
    assert len(planner(fixed(9), max_instances=2).plan(1.0, names(3), 0).instance_ids) == 1


def test_the_budget_of_any_hour_is_kept() -> None:
    """Five starts an hour, however much is wanted and however often instances are lost."""
    one = planner(fixed(10), starts_per_h=5, min_instances=1, step=3, cooldown_s=0.0)
    starts: list[float] = []
    for second in range(0, 3 * 3600, 30):
        decision = one.plan(float(second), [], 0)  # whatever was started is lost
        if decision.kind == START:
            starts += [float(second)] * decision.num
            one.done(float(second), decision)
        assert sum(1 for start_s in starts if start_s > second - 3600) <= 5
    assert len(starts) == 15


def test_the_instance_that_nobody_misses_is_drained() -> None:
    """Requests on the others would have ended later elsewhere."""
    bounds = ScalingLimits(calm_s=10.0)
    observed = Observed(Aims(cold_start_s=0.0), bounds)
    one = Planner(fixed(2), bounds, observed)
    one.plan(0.0, names(3), 0)
    for second in range(10):
        for name, later_s in (("i0", 3.0), ("i1", 1.0), ("i2", 5.0)):
            observed.placed(float(second), Placed(
                request_id=f"{name}/{second}", instance_id=name, prompt_tokens=9, output_tokens=9, e2e_s=2.0,
                next_best_e2e_s=2.0 + later_s,
            ))  # fmt: skip
    decision = one.plan(10.0, names(3), 0)
    assert decision.instance_ids == ("i1",)
    assert decision.numbers["missed_s"] == pytest.approx(10.0, abs=1.0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-3, 40), st.integers(-3, 40)), min_size=1, max_size=200),
    st.integers(0, 6), st.integers(1, 12), st.integers(1, 5), st.integers(0, 12),
)  # fmt: skip
def test_whatever_a_rule_wants_limits_hold(
    wishes: list[tuple[int, int]], least: int, more: int, step: int, present: int
) -> None:
    """Never outside min and max once there, never more than a step, never two changes within the cooldown."""
    limits = ScalingLimits(
        min_instances=least, max_instances=least + more, step=step, cooldown_s=20.0, calm_s=30.0, starts_per_h=9999
    )
    turn = iter(wishes)
    one = Planner(
        lambda now: ScalingTarget(num_wanted=now.num_present + (w := next(turn))[0], num_enough=w[1], why=""),
        limits, Observed(Aims(cold_start_s=0.0), limits),
    )  # fmt: skip
    last_s = -1e9
    for place in range(len(wishes)):
        now_s = place * 5.0
        decision = one.plan(now_s, names(present), 0)
        within = least <= present <= least + more
        if decision.kind == NOTHING:
            assert present >= least
            continue
        assert abs(decision.num_desired - present) <= step
        if within:
            assert least <= decision.num_desired <= least + more
            assert now_s - last_s >= (20.0 if decision.kind == START else 30.0)
        present, last_s = decision.num_desired, now_s
        one.done(now_s, decision)


@pytest.mark.parametrize("rate", [3.0, 9.0, 24.0])
def test_headroom_never_oscillates_under_constant_load(rate: float) -> None:
    """After it has settled, Poisson arrivals of a constant rate change nothing for an hour."""
    limits = ScalingLimits(max_instances=12)
    world = World(rule=rule_from("headroom", AIMS), aims=AIMS, limits=limits, rate=lambda _: rate, first=2, seed=3)
    world.run(5400)
    assert [change for change in world.changes if change[0] > 1800] == []
    assert all(limits.min_instances <= num <= limits.max_instances for num in world.counts)


@pytest.mark.parametrize("name", ["preempt", "relief"])
def test_the_papers_rules_as_they_are_in_the_paper_only_grow(name: str) -> None:
    """Where nothing shrinks nothing oscillates, and there is more than needed in the end."""
    limits = ScalingLimits(max_instances=12, shrink=False)
    world = World(rule=rule_from(name, AIMS), aims=AIMS, limits=limits, rate=lambda _: 24.0, first=2, seed=3)
    world.run(1200)
    sizes = [num for _, num in world.changes]
    assert sizes == sorted(sizes)
    assert sizes[-1] > needed(24.0, AIMS.target_share)


def test_headroom_settles_on_what_is_needed() -> None:
    """Not fewer than the rate takes at full seats, and at most one more than it takes at the share aimed at."""
    world = World(rule=rule_from("headroom", AIMS), aims=AIMS, limits=ScalingLimits(), rate=lambda _: 9.0, first=1)
    world.run(1200)
    assert needed(9.0, 1.0) <= world.counts[-1] <= needed(9.0, AIMS.target_share) + 1


@pytest.mark.parametrize("cold_start_s", [60.0, 300.0])
def test_headroom_is_there_before_a_ramp_hurts(cold_start_s: float) -> None:
    """What preempt only notices when it is too late, headroom has started for; with no more instances in the end."""
    aims = Aims(threshold_s=20.0, seats=SEATS, cold_start_s=cold_start_s, target_share=0.8)
    p99 = {}
    for name in ("headroom", "preempt"):
        world = World(
            rule=rule_from(name, aims), aims=aims, limits=ScalingLimits(max_instances=12), first=2, cold_start_s=cold_start_s,
            rate=lambda now_s: 4.0 + 10.0 * min(1.0, max(0.0, now_s - 300.0) / 900.0), seed=5,
        )  # fmt: skip
        world.run(2400)
        p99[name] = float(np.quantile(world.latencies, 0.99))
    assert p99["headroom"] < p99["preempt"]
    assert p99["headroom"] < aims.threshold_s


@pytest.mark.parametrize("cold_start_s", [60.0, 300.0])
def test_headroom_lets_go_after_a_burst_and_only_then(cold_start_s: float) -> None:
    """Up for the burst, down to where it was within a while, and that is all."""
    aims = replace(AIMS, cold_start_s=cold_start_s)
    world = World(
        rule=rule_from("headroom", aims), aims=aims, limits=ScalingLimits(max_instances=12), first=2, seed=7,
        cold_start_s=cold_start_s, rate=lambda now_s: 16.0 if 600.0 <= now_s < 1200.0 else 4.0,
    )  # fmt: skip
    world.run(3000)
    assert max(world.counts[600:1200]) >= needed(16.0, 1.0)
    assert world.counts[-1] <= needed(4.0, AIMS.target_share) + 1
    sizes = [num for time_s, num in world.changes if time_s >= 600]
    top = sizes.index(max(sizes))
    assert sizes[: top + 1] == sorted(sizes[: top + 1])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)


def test_lost_outcomes_do_not_pile_up_for_ever() -> None:
    """A request whose end nobody told is forgotten."""
    bounds = ScalingLimits()
    observed = Observed(AIMS, bounds)
    observed.placed(0.0, Placed(request_id="a", instance_id="i0", prompt_tokens=1, output_tokens=1, e2e_s=5.0))
    assert observed.situation(500.0, num_ready=1, num_starting=0).in_flight == 1
    assert observed.situation(606.0, num_ready=1, num_starting=0).in_flight == 0


def test_situations_are_summed_up_whatever_the_pause() -> None:
    """A day without a request is no trouble, and no forecast is nonsense."""
    bounds = ScalingLimits()
    observed = Observed(AIMS, bounds)
    observed.placed(0.0, Placed(request_id="a", instance_id="i", prompt_tokens=1, output_tokens=1, e2e_s=float("inf")))
    observed.placed(1.0, Placed(request_id="b", instance_id="i", prompt_tokens=1, output_tokens=1, e2e_s=1.0))
    now: PoolState = observed.situation(86400.0, num_ready=0, num_starting=0)
    assert now.trend.level_per_s == 0.0
    assert now.in_flight == 0
    assert bears(0.5) > 0
