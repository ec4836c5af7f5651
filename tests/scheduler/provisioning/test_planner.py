"""The planner keeps the limits, does not oscillate, and starts instances early enough."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.provisioning import rule_from
from scheduler.provisioning.history import PlacedRequest, PoolHistory
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.planner import DRAIN, NOTHING, START, Planner, ScalingDecision
from scheduler.provisioning.pool_state import PoolState, ScalingTarget, TierNeeds
from tests.scheduler.provisioning.worlds import SEATS, World, needed, throughput

OBJECTIVES = ScalingObjectives(threshold_s=20.0, seats=SEATS, cold_start_s=60.0, target_share=0.8)


def fixed(wanted: int, enough: int | None = None) -> object:
    """Return a rule with a constant target."""
    return lambda _: ScalingTarget(num_wanted=wanted, num_enough=wanted if enough is None else enough, why="constant")


def planner(rule: object, **limits: object) -> Planner:
    """Return a planner of a pool without history."""
    bounds = ScalingLimits(**limits)
    return Planner(rule, bounds, PoolHistory(ScalingObjectives(cold_start_s=0.0), bounds))


def names(num: int) -> list[str]:
    """Return instance ids."""
    return [f"i{number}" for number in range(num)]


def test_a_start_is_limited_by_step_and_max_instances() -> None:
    """From two to nine wanted: four at once, then the rest up to the maximum."""
    one = planner(fixed(9), max_instances=7, step=4, cooldown_s=15.0)
    first = one.plan(0.0, names(2), 0)
    assert (first.kind, first.num, first.num_desired) == (START, 4, 6)
    one.applied(0.0, first)
    assert one.plan(14.0, names(2), 4).kind == NOTHING
    second = one.plan(15.0, names(2), 4)
    assert (second.kind, second.num, second.num_desired) == (START, 1, 7)


def test_below_min_instances_there_is_no_cooldown() -> None:
    """Instances below the minimum are started regardless of the rule and the cooldown."""
    one = planner(fixed(0), min_instances=3, cooldown_s=1000.0)
    one.applied(0.0, ScalingDecision(kind=START, num=1))
    assert one.plan(1.0, names(1), 0).num == 2


def test_instances_are_drained_after_a_whole_calm_period() -> None:
    """A single target that needs all instances restarts the calm period."""
    targets = {"enough": 2}
    one = planner(lambda _: ScalingTarget(num_wanted=2, num_enough=targets["enough"], why=""), calm_s=100.0)
    for second in range(100):
        assert one.plan(float(second), names(4), 0).kind == NOTHING
    decision = one.plan(100.0, names(4), 0)
    assert (decision.kind, decision.instance_ids) == (DRAIN, ("i0", "i1"))
    targets["enough"] = 4
    assert one.plan(101.0, names(4), 0).kind == NOTHING
    targets["enough"] = 2
    assert one.plan(102.0, names(4), 0).kind == NOTHING
    assert one.plan(200.5, names(4), 0).kind == NOTHING
    assert one.plan(201.5, names(4), 0).kind == DRAIN


def test_no_instance_is_drained_while_others_start_or_without_shrink() -> None:
    """Instances above the maximum are drained at once."""
    one = planner(fixed(1), calm_s=0.0)
    assert one.plan(1.0, names(3), 1).kind == NOTHING
    assert planner(fixed(1), calm_s=0.0, shrink=False).plan(1.0, names(3), 0).kind == NOTHING
    assert len(planner(fixed(9), max_instances=2).plan(1.0, names(3), 0).instance_ids) == 1


def test_starts_per_hour_are_limited() -> None:
    """Five starts per hour, regardless of the target and of lost instances."""
    one = planner(fixed(10), starts_per_h=5, min_instances=1, step=3, cooldown_s=0.0)
    starts: list[float] = []
    for second in range(0, 3 * 3600, 30):
        decision = one.plan(float(second), [], 0)  # all started instances are lost
        if decision.kind == START:
            starts += [float(second)] * decision.num
            one.applied(float(second), decision)
        assert sum(1 for start_s in starts if start_s > second - 3600) <= 5
    assert len(starts) == 15


def test_the_instance_with_the_lowest_removal_cost_is_drained() -> None:
    """Requests on the other instances would have had a higher latency elsewhere."""
    bounds = ScalingLimits(calm_s=10.0)
    history = PoolHistory(ScalingObjectives(cold_start_s=0.0), bounds)
    one = Planner(fixed(2), bounds, history)
    one.plan(0.0, names(3), 0)
    for second in range(10):
        for name, later_s in (("i0", 3.0), ("i1", 1.0), ("i2", 5.0)):
            history.add_placement(float(second), PlacedRequest(
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
def test_limits_hold_for_any_targets(
    targets: list[tuple[int, int]], minimum: int, more: int, step: int, present: int
) -> None:
    """Never outside minimum and maximum once within, at most a step at a time, and no two changes within the cooldown."""
    limits = ScalingLimits(
        min_instances=minimum, max_instances=minimum + more, step=step, cooldown_s=20.0, calm_s=30.0, starts_per_h=9999
    )
    turn = iter(targets)
    one = Planner(
        lambda now: ScalingTarget(num_wanted=now.num_present + (w := next(turn))[0], num_enough=w[1], why=""),
        limits, PoolHistory(ScalingObjectives(cold_start_s=0.0), limits),
    )  # fmt: skip
    last_s = -1e9
    for number in range(len(targets)):
        now_s = number * 5.0
        decision = one.plan(now_s, names(present), 0)
        within = minimum <= present <= minimum + more
        if decision.kind == NOTHING:
            assert present >= minimum
            continue
        assert abs(decision.num_desired - present) <= step
        if within:
            assert minimum <= decision.num_desired <= minimum + more
            assert now_s - last_s >= (20.0 if decision.kind == START else 30.0)
        present, last_s = decision.num_desired, now_s
        one.applied(now_s, decision)


def test_with_tiers_only_idle_instances_of_the_pool_are_drained() -> None:
    """Unless there are more instances than the maximum."""
    one = planner(fixed(1), calm_s=10.0, max_instances=3)
    one.plan(0.0, names(3), 0, tiers=TierNeeds(idle=("i1",)))
    assert one.plan(20.0, names(3), 0, tiers=TierNeeds(idle=("i1",))).instance_ids == ("i1",)
    assert one.plan(40.0, names(3), 0, tiers=TierNeeds()).kind == NOTHING
    assert one.plan(60.0, names(4), 0, tiers=TierNeeds()).kind == DRAIN


@pytest.mark.parametrize(
    "rate", [pytest.param(3.0, marks=pytest.mark.slow), 9.0, pytest.param(24.0, marks=pytest.mark.slow)]
)
def test_headroom_never_oscillates_under_constant_load(rate: float) -> None:
    """After it has settled, Poisson arrivals at a constant rate cause no change for an hour."""
    limits = ScalingLimits(max_instances=12)
    world = World(
        rule=rule_from("headroom", OBJECTIVES),
        objectives=OBJECTIVES,
        limits=limits,
        rate=lambda _: rate,
        first=2,
        seed=3,
    )
    world.run(5400)
    assert [change for change in world.changes if change[0] > 1800] == []
    assert all(limits.min_instances <= num <= limits.max_instances for num in world.counts)


@pytest.mark.parametrize("name", ["preempt", "relief"])
def test_the_rules_of_the_paper_only_grow_without_shrink(name: str) -> None:
    """Without shrinking there is no oscillation, and more instances than needed in the end."""
    limits = ScalingLimits(max_instances=12, shrink=False)
    world = World(
        rule=rule_from(name, OBJECTIVES), objectives=OBJECTIVES, limits=limits, rate=lambda _: 24.0, first=2, seed=3
    )
    world.run(1200)
    sizes = [num for _, num in world.changes]
    assert sizes == sorted(sizes)
    assert sizes[-1] > needed(24.0, OBJECTIVES.target_share)


def test_headroom_settles_on_what_is_needed() -> None:
    """At least the number that the rate needs at full seats, at most one more than it needs at the target share."""
    world = World(
        rule=rule_from("headroom", OBJECTIVES),
        objectives=OBJECTIVES,
        limits=ScalingLimits(),
        rate=lambda _: 9.0,
        first=1,
    )
    world.run(1200)
    assert needed(9.0, 1.0) <= world.counts[-1] <= needed(9.0, OBJECTIVES.target_share) + 1


@pytest.mark.parametrize("cold_start_s", [pytest.param(60.0, marks=pytest.mark.slow), 300.0])
def test_headroom_starts_instances_before_a_ramp_raises_latency(cold_start_s: float) -> None:
    """Headroom starts instances before forecasts reach the threshold, preempt only then."""
    objectives = ScalingObjectives(threshold_s=20.0, seats=SEATS, cold_start_s=cold_start_s, target_share=0.8)
    p99 = {}
    for name in ("headroom", "preempt"):
        world = World(
            rule=rule_from(name, objectives), objectives=objectives, limits=ScalingLimits(max_instances=12), first=2, cold_start_s=cold_start_s,
            rate=lambda now_s: 4.0 + 10.0 * min(1.0, max(0.0, now_s - 300.0) / 900.0), seed=5,
        )  # fmt: skip
        world.run(2400)
        p99[name] = float(np.quantile(world.latencies, 0.99))
    assert p99["headroom"] < p99["preempt"]
    assert p99["headroom"] < objectives.threshold_s


@pytest.mark.parametrize("cold_start_s", [60.0, pytest.param(300.0, marks=pytest.mark.slow)])
def test_headroom_grows_for_a_burst_and_shrinks_after_it(cold_start_s: float) -> None:
    """The size rises for the burst, falls to its former level after it, and does not oscillate."""
    objectives = replace(OBJECTIVES, cold_start_s=cold_start_s)
    world = World(
        rule=rule_from("headroom", objectives), objectives=objectives, limits=ScalingLimits(max_instances=12), first=2, seed=7,
        cold_start_s=cold_start_s, rate=lambda now_s: 16.0 if 600.0 <= now_s < 1200.0 else 4.0,
    )  # fmt: skip
    world.run(3000)
    assert max(world.counts[600:1200]) >= needed(16.0, 1.0)
    assert world.counts[-1] <= needed(4.0, OBJECTIVES.target_share) + 1
    sizes = [num for time_s, num in world.changes if time_s >= 600]
    top = sizes.index(max(sizes))
    assert sizes[: top + 1] == sorted(sizes[: top + 1])
    assert sizes[top:] == sorted(sizes[top:], reverse=True)


def test_requests_without_outcome_are_dropped() -> None:
    """A request whose end is not reported counts only for a limited time."""
    bounds = ScalingLimits()
    history = PoolHistory(OBJECTIVES, bounds)
    history.add_placement(
        0.0, PlacedRequest(request_id="a", instance_id="i0", prompt_tokens=1, output_tokens=1, e2e_s=5.0)
    )
    assert history.state(500.0, num_ready=1, num_starting=0).in_flight == 1
    assert history.state(606.0, num_ready=1, num_starting=0).in_flight == 0


def test_the_state_is_correct_after_a_long_pause() -> None:
    """A day without requests leaves no trend; a placement without a finite forecast is ignored."""
    bounds = ScalingLimits()
    history = PoolHistory(OBJECTIVES, bounds)
    history.add_placement(
        0.0, PlacedRequest(request_id="a", instance_id="i", prompt_tokens=1, output_tokens=1, e2e_s=float("inf"))
    )
    history.add_placement(
        1.0, PlacedRequest(request_id="b", instance_id="i", prompt_tokens=1, output_tokens=1, e2e_s=1.0)
    )
    now: PoolState = history.state(86400.0, num_ready=0, num_starting=0)
    assert now.trend.level_per_s == 0.0
    assert now.in_flight == 0
    assert throughput(0.5) > 0
