"""Simulated clusters whose instances move between tiers, by the planner of the live provisioner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from predictor.tabulated_costs import step_seconds, tabulate
from scheduler.instances import DECODE_ROLE, PREFILL_ROLE
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.tier_planner import TierPlace
from scheduler.provisioning.tiers import Tier
from simulator.assembly import simulation
from simulator.autoscaling import AutoscalingOptions, ProvisionedRun, moved_between_tiers, simulate_provisioned
from simulator.conditions import Conditions
from simulator.metrics import latencies, summary
from simulator.mix import MixEntry, mixed_workload
from simulator.workload import Workload, by_schedule, poisson_gaps, workload
from tests.simulator.small_clusters import A30, config, lengths, specs

STRICT, LOOSE = Tier(name="strict", tpot_slo_s=0.05), Tier(name="loose", tpot_slo_s=0.2)
TIERS = (STRICT, LOOSE)
MIX = (
    MixEntry(name="chat", share=0.4, ttft_slo_s=2.0, tpot_slo_s=0.05),
    MixEntry(name="batch", share=0.4, ttft_slo_s=4.0, tpot_slo_s=0.2),
    MixEntry(name="rest", share=0.2, request_class="best-effort"),
)
FLEET = 6
LIMITS = ScalingLimits(min_instances=FLEET, max_instances=FLEET)
OPTIONS = AutoscalingOptions(rule="tiers", first=FLEET, cold_start_s=0.0, limits=LIMITS, tiers=TIERS)


def burst(num: int = 900, seed: int = 0) -> Workload:
    """A low rate, a high rate for a minute, and the low rate again; each request has a target or is best effort."""
    gaps = poisson_gaps(num, np.random.default_rng(seed))
    work = workload(lengths(num, seed), by_schedule(gaps, [(0.0, 1.0), (60.0, 10.0), (120.0, 1.0)]))
    return mixed_workload(work, MIX, seed)


def run(work: Workload, policy: str = "polyserve", **changes: Any) -> ProvisionedRun:
    """Serve a workload with up to six small instances."""
    return simulate_provisioned(specs(FLEET, A30), work, policy, replace(OPTIONS, **changes))


def in_tiers(done: ProvisionedRun) -> list[dict[str, TierPlace]]:
    """The places of the instances after each move."""
    places: list[dict[str, TierPlace]] = [{}]
    for _, move in done.moves:
        places.append({**places[-1], move.instance_id: move.place})
    return places


@pytest.mark.parametrize("policy", ["polyserve", "slo"])
def test_a_fixed_fleet_serves_by_tiers_that_grow_and_shrink(policy: str) -> None:
    """No request is lost; instances join both tiers, and return to the pool; those in the pool do not count as serving."""
    done = run(burst(), policy)
    assert not np.isnan(latencies(done.result).e2e_s).any()
    assert done.changes == []
    assert done.instance_s == pytest.approx(FLEET * done.result.end_s)
    sizes = [sum(bool(place.tier) for place in places.values()) for places in in_tiers(done)]
    assert max(sizes) >= 2
    assert any(later < before for before, later in pairwise(sizes))
    assert {move.place.tier for _, move in done.moves} == {"", "strict", "loose"}
    assert set(done.tier_s) == {"strict", "loose"}
    assert min(done.tier_s.values()) > 0
    assert sum(done.tier_s.values()) <= done.serving_s + 1e-6 < done.instance_s


def test_serving_time_of_a_part_of_a_run() -> None:
    """It is the number of instances that are in tiers or leave one, by their moves, summed every 10 ms."""
    sim = simulation(specs(FLEET, A30), burst(400), "slo", Conditions(), seed=0)
    moved = moved_between_tiers(sim, TIERS)
    end_s = sim.run().end_s
    assert moved.moves[0][0] < 60.0
    assert end_s > 75.0

    def num_serving(now_s: float) -> int:
        places = {move.instance_id: move.place for time_s, move in moved.moves if time_s <= now_s}
        return sum(bool(place.tier) for place in places.values())

    for start_s, until_s in ((0.0, 10.0), (60.0, 75.0), (61.5, 62.0)):
        times = np.arange(start_s, until_s, 0.01) + 0.005
        dumb_s = 0.01 * sum(num_serving(float(now_s)) for now_s in times)
        assert moved.serving_s(until_s, start_s) == pytest.approx(dumb_s, abs=1e-6)


def test_bounds_of_tiers_hold_in_every_moment() -> None:
    """A tier never has more instances than its maximum, and soon has its minimum, also without requests."""
    tiers = (replace(STRICT, max_instances=2), replace(LOOSE, min_instances=2))
    done = run(burst(), tiers=tiers)
    assert not np.isnan(latencies(done.result).e2e_s).any()
    for places in in_tiers(done):
        assert sum(place == TierPlace("strict") for place in places.values()) <= 2
    assert done.tier_s["loose"] >= 2 * (done.result.end_s - 3.0)


def test_a_pool_grows_for_its_tiers_and_shrinks_again() -> None:
    """The rule starts an instance where requests wait and the pool is empty, and lets idle ones leave."""
    limits = ScalingLimits(min_instances=1, max_instances=FLEET, cooldown_s=2.0, calm_s=20.0)
    done = run(burst(), first=1, cold_start_s=5.0, limits=limits, objectives=ScalingObjectives(cold_start_s=5.0))
    assert not np.isnan(latencies(done.result).e2e_s).any()
    sizes = [change.num_present for change in done.changes]
    assert max(sizes) >= 2
    assert sizes[-1] < max(sizes)
    assert done.serving_s <= done.instance_s < FLEET * done.result.end_s


def test_slow_instances_serve_the_loose_tier_only() -> None:
    """Of a fleet of two kinds, those whose step is too long for the strict tier never join it."""
    slow = [replace(spec, pace=3.0, predicted_pace=3.0) for spec in specs(3, A30)]
    done = simulate_provisioned([*specs(3, A30), *slow], burst(), "polyserve", OPTIONS)
    joined = {
        tier: {move.instance_id for _, move in done.moves if move.place == TierPlace(tier)} for tier in done.tier_s
    }
    assert joined["strict"]
    assert joined["strict"] <= {"instance-0", "instance-1", "instance-2"}
    assert joined["loose"]


def test_an_engine_whose_full_step_is_longer_than_the_bound_keeps_the_deadlines_of_its_tier() -> None:
    """The rule of vLLM fills such steps; forecasts know them, so it is no reason to leave the tier empty."""
    fleet = [replace(spec, config=config(max_num_batched_tokens=512)) for spec in specs(FLEET, A30)]
    full_step_s = step_seconds(tabulate(A30, 512, 8), 512, 1, 0, 0.0, 1, 512.0**2, 0.0)
    assert full_step_s > STRICT.tpot_slo_s
    done = simulate_provisioned(fleet, burst(400), "polyserve", OPTIONS)
    assert any(move.place == TierPlace("strict") for _, move in done.moves)
    assert summary(done.result)["by_tier"]["0.05"]["deadline_attained"] > 0.95


def test_only_instances_that_decode_join_tiers() -> None:
    """A prefill instance fills no tier, and a full tier does not close it: each request has two legs."""
    prefill, decode = ({"config": config(kv_role=kv_role)} for kv_role in ("kv_producer", "kv_consumer"))
    pools = [
        *[replace(spec, role=PREFILL_ROLE, **prefill) for spec in specs(1, A30)],
        *[replace(spec, role=DECODE_ROLE, **decode) for spec in specs(2, A30)],
    ]
    tiers = (replace(STRICT, min_instances=1, max_instances=1), LOOSE)
    options = AutoscalingOptions(first=3, limits=ScalingLimits(max_instances=3), tiers=tiers)
    done = simulate_provisioned(pools, burst(200), "polyserve", options)
    assert not np.isnan(latencies(done.result).e2e_s).any()
    assert {move.instance_id for _, move in done.moves} == {"instance-1", "instance-2"}
    assert done.moves[0][1].place == TierPlace("strict")
    assert (done.result.decisions.prefill_instance == 0).any()
    with pytest.raises(ValueError, match="^instances.role: the number of instances with roles does not change"):
        simulate_provisioned(pools, burst(200), "polyserve", replace(options, rule="tiers"))


def test_a_tier_that_no_instance_can_serve_is_refused() -> None:
    """The error names the tier, and the shortest step of the instances that decode."""
    with pytest.raises(ValueError, match=r"no instance can keep the 10 ms of 'strict': .* takes 29\.\d ms$"):
        run(burst(10), tiers=(replace(STRICT, tpot_slo_s=0.01), LOOSE))
    prefill = [replace(spec, role=PREFILL_ROLE, predicted_pace=0.1, pace=0.1) for spec in specs(1, A30)]
    sim = simulation([*prefill, *specs(1, A30)], burst(10), "slo", Conditions(), seed=0)
    with pytest.raises(ValueError, match="^tier: tpot_slo_s: no instance can keep the 10 ms of 'strict'"):
        moved_between_tiers(sim, (replace(STRICT, tpot_slo_s=0.01),))


def test_the_same_arguments_give_the_same_run() -> None:
    """Moves and costs are equal."""
    one, other = run(burst(300)), run(burst(300))
    assert one.moves == other.moves
    assert one.serving_s == other.serving_s


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tiers": ()}, "tiers: is missing"),
        ({"tiers": (STRICT, STRICT)}, "tier: tpot_slo_s"),
        ({"tiers": (STRICT, replace(LOOSE, name="strict"))}, "tier: name: 'strict' is a duplicate"),
        ({"tiers": (replace(STRICT, min_instances=7),)}, "tier: min_instances"),
        ({"tier_hold_s": -1.0}, "tier_hold_s"),
    ],
)
def test_invalid_options_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """The error comes before the simulation."""
    with pytest.raises(ValueError, match=f"^{named}"):
        replace(OPTIONS, **changes)
