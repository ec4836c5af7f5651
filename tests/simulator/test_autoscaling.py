"""Simulated clusters that grow and shrink by the provisioner's rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from simulator.autoscaling import STATIC, AutoscalingOptions, ProvisionedRun, simulate_provisioned
from simulator.conditions import Conditions, Outage
from simulator.metrics import latencies
from simulator.result import LOST, STATUSES
from simulator.workload import Workload, by_schedule, poisson_gaps, workload
from tests.simulator.small_clusters import A30, lengths, specs

OBJECTIVES = ScalingObjectives(threshold_s=8.0, cold_start_s=10.0, seats=8)


def burst(num: int = 3000, seed: int = 0) -> Workload:
    """A low rate, a high rate for two minutes, and the low rate again."""
    gaps = poisson_gaps(num, np.random.default_rng(seed))
    return workload(lengths(num, seed), by_schedule(gaps, [(0.0, 2.0), (60.0, 12.0), (180.0, 2.0)]))


def run(rule: str, work: Workload, conditions: Conditions | None = None, **changes: Any) -> ProvisionedRun:
    """Serve a workload with up to six small instances."""
    limits = ScalingLimits(max_instances=6, cooldown_s=5.0, calm_s=30.0, shrink=rule == "headroom")
    options = replace(
        AutoscalingOptions(rule=rule, first=1, cold_start_s=10.0, objectives=OBJECTIVES, limits=limits), **changes
    )
    return simulate_provisioned(specs(6, A30), work, "block", options, conditions)


def test_no_request_is_lost_while_a_cluster_grows_and_shrinks() -> None:
    """Every request finishes, drained instances finish theirs, and the paid time covers all instances."""
    done = run("headroom", burst())
    assert not np.isnan(latencies(done.result).e2e_s).any()
    sizes = [change.num_present for change in done.changes]
    assert max(sizes) > 1
    assert sizes[-1] < max(sizes)
    assert all(1 <= size <= 6 for size in sizes)
    assert all(change.why for change in done.changes)
    assert done.result.end_s < done.instance_s < 6 * done.result.end_s
    assert done.result.up_s <= done.instance_s + 1e-6  # cold starts are paid for, too


def test_instances_fail_while_they_drain_or_are_not_started() -> None:
    """An outage neither starts an instance nor keeps one from being removed; all requests finish."""
    calm = run("headroom", burst())
    drained_s = next(after.time_s for before, after in pairwise(calm.changes) if after.num_present < before.num_present)
    outages = tuple(
        Outage(instance=index, from_s=from_s + 0.1 * index, until_s=from_s + 20.0)
        for from_s in (5.0, drained_s + 0.05)
        for index in range(1, 6)
    )
    done = run("headroom", burst(), conditions=Conditions(outages=outages))
    lost = done.result.decisions.status == STATUSES.index(LOST)
    assert (np.isnan(latencies(done.result).e2e_s) == lost).all()
    assert done.changes[-1].num_present < max(change.num_present for change in done.changes)
    instance, arrival_s = np.asarray(done.result.decisions.instance), done.result.work.arrival_s
    assert (instance[arrival_s < done.changes[0].time_s + 10.0] == 0).all()  # at 25 s, none has come up by itself


def test_instances_serve_only_after_their_cold_start() -> None:
    """No request goes to an instance before it is ready."""
    done = run("headroom", burst(), cold_start_s=25.0)
    first_s = done.changes[0].time_s
    instance, arrival_s = np.asarray(done.result.decisions.instance), done.result.work.arrival_s
    assert (instance[arrival_s < first_s + 25.0] == 0).all()
    assert (instance[arrival_s > first_s + 30.0] > 0).any()


def test_the_papers_rules_only_grow() -> None:
    """They never shrink, and preempt, which uses forecasts, acts no later than relief, which uses measurements."""
    done = {rule: run(rule, burst()) for rule in ("preempt", "relief")}
    for one in done.values():
        sizes = [change.num_present for change in one.changes]
        assert sizes == sorted(sizes)
        assert sizes
    assert done["preempt"].changes[0].time_s <= done["relief"].changes[0].time_s


def test_the_same_arguments_give_the_same_run() -> None:
    """Changes and cost are equal."""
    one, other = run("headroom", burst(800)), run("headroom", burst(800))
    assert one.changes == other.changes
    assert one.instance_s == other.instance_s


def test_a_static_cluster_never_changes() -> None:
    """All instances are paid for from beginning to end."""
    done = run(STATIC, burst(500), first=3)
    assert done.changes == []
    assert done.instance_s == pytest.approx(3 * done.result.end_s)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first": 0}, "first"),
        ({"first": 7}, "first"),
        ({"cold_start_s": 901.0}, "cold_start_s"),
        ({"cold_start_s": -1.0}, "cold_start_s"),
        ({"rule": "unknown"}, "rule"),
    ],
)
def test_invalid_options_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """The error comes before the simulation."""
    with pytest.raises(ValueError, match=f"^{named}: "):
        run(changes.pop("rule", "headroom"), burst(10), **changes)
