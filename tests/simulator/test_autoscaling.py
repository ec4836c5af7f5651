"""Clusters that grow and shrink on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.provisioning.limits import Aims, ScalingLimits
from simulator.autoscaling import STATIC, Provisioned, Provisioning, provisioned
from simulator.metrics import latencies
from simulator.workload import Workload, by_schedule, poisson_gaps, workload
from tests.simulator.small_clusters import A30, lengths, units

AIMS = Aims(threshold_s=8.0, cold_start_s=10.0, seats=8)


def burst(num: int = 3000, seed: int = 0) -> Workload:
    """Few requests, many for two minutes, and few again."""
    gaps = poisson_gaps(num, np.random.default_rng(seed))
    return workload(lengths(num, seed), by_schedule(gaps, [(0.0, 2.0), (60.0, 12.0), (180.0, 2.0)]))


def run(rule: str, work: Workload, **changes: Any) -> Provisioned:
    """Serve it with up to six small instances."""
    limits = ScalingLimits(max_instances=6, cooldown_s=5.0, calm_s=30.0, shrink=rule == "headroom")
    how = replace(Provisioning(rule=rule, first=1, cold_start_s=10.0, aims=AIMS, limits=limits), **changes)
    return provisioned(units(6, A30), work, "block", how)


def test_nothing_is_lost_while_a_cluster_grows_and_shrinks() -> None:
    """Every request ends, instances that leave finish first, and what is paid for is what was there."""
    done = run("headroom", burst())
    assert not np.isnan(latencies(done.result).e2e_s).any()
    sizes = [change.num_present for change in done.changes]
    assert max(sizes) > 1
    assert sizes[-1] < max(sizes)
    assert all(1 <= size <= 6 for size in sizes)
    assert all(change.why for change in done.changes)
    assert done.result.end_s < done.instance_s < 6 * done.result.end_s
    assert done.result.up_s <= done.instance_s + 1e-6  # cold starts are paid for, too


def test_what_is_started_serves_only_after_its_cold_start() -> None:
    """No request goes to an instance before it is there."""
    done = run("headroom", burst(), cold_start_s=25.0)
    first_s = done.changes[0].time_s
    instance, arrival_s = np.asarray(done.result.decisions.instance), done.result.work.arrival_s
    assert (instance[arrival_s < first_s + 25.0] == 0).all()
    assert (instance[arrival_s > first_s + 30.0] > 0).any()


def test_the_papers_rules_only_grow() -> None:
    """Preempt acts no later than relief: what is foreseen comes before what has happened."""
    done = {rule: run(rule, burst()) for rule in ("preempt", "relief")}
    for one in done.values():
        sizes = [change.num_present for change in one.changes]
        assert sizes == sorted(sizes)
        assert sizes
    assert done["preempt"].changes[0].time_s <= done["relief"].changes[0].time_s


def test_the_same_arguments_give_the_same_run() -> None:
    """To the last change."""
    one, other = run("headroom", burst(800)), run("headroom", burst(800))
    assert one.changes == other.changes
    assert one.instance_s == other.instance_s


def test_a_static_cluster_never_changes() -> None:
    """All of it is paid for from beginning to end."""
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
        ({"rule": "wishful"}, "rule"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """Before anything is simulated."""
    with pytest.raises(ValueError, match=f"^{named}: "):
        run(changes.pop("rule", "headroom"), burst(10), **changes)
