"""Requests that wait get their turn so that few are late, and come to an end all the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.admission.queue import RETRY_S
from simulator.assembly import simulate
from simulator.conditions import TURNS, Conditions
from simulator.metrics import latencies
from simulator.result import STATUSES
from simulator.workload import noisy, tagged
from tests.simulator.small_clusters import poisson, specs

LONG_HOLD = 'hold: hold = "predicted_queue_s < 0.2 and predicted_preemptions < 1", hold_s = 1000'


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("num_schedulers", [1, 3])
def test_held_requests_are_conserved(turn: str, num_schedulers: int) -> None:
    """Every request that was held back is served in the end."""
    work = tagged(poisson(300, 25.0), noisy(0.4), np.random.default_rng(3))
    conditions = Conditions(late_s=1.0, admission_turn=turn, num_schedulers=num_schedulers)
    result = simulate(specs(), work, "hold", conditions, seed=2)
    assert (result.decisions.status == STATUSES.index("finished")).all()
    assert (result.outcomes.produced_tokens == work.lengths.output_tokens).all()


def test_holding_back_avoids_preemptions() -> None:
    """With true lengths nobody is preempted where nobody is admitted who would cause it."""
    made, work = specs(num_gpu_blocks=60), poisson(300, 25.0)
    plain, held = (simulate(made, work, policy) for policy in ("block", LONG_HOLD))
    assert plain.outcomes.num_preemptions.sum() > 20
    assert held.outcomes.num_preemptions.sum() == 0


def test_fewer_are_late_by_turns() -> None:
    """In an overload the order matters most."""
    work = poisson(400, 22.0)
    first, fewest = (
        latencies(simulate(specs(), work, LONG_HOLD, Conditions(late_s=1.0, admission_turn=turn))).ttft_s
        for turn in ("late_last", "fewest_late")
    )
    plain = latencies(simulate(specs(), work, "block")).ttft_s
    assert (fewest > 1.0).sum() < (first > 1.0).sum() < (plain > 1.0).sum()


def test_what_is_admitted_can_be_said_with_indicators() -> None:
    """A formula over indicators alone holds requests back from a full batch, and needs no forecast."""
    work = poisson(200, 25.0)
    result = simulate(specs(), work, 'jsq: hold = "batch_size < 8", hold_s = 1000')
    waited_s = result.outcomes.scheduled_s - work.arrival_s
    assert (result.decisions.status == STATUSES.index("finished")).all()
    assert np.isnan(result.decisions.predicted_e2e_s).all()
    assert waited_s.max() > 0.5


def test_no_request_is_held_beyond_its_deadline() -> None:
    """Where no instance ever admits, each request goes at its deadline, and starts with its engine's next step."""
    work = poisson(100, 5.0)
    result = simulate(specs(), work, 'block: hold = "num_running < 0", hold_s = 2')
    waited_s = result.outcomes.scheduled_s - work.arrival_s
    assert (result.decisions.status == STATUSES.index("finished")).all()
    assert waited_s.min() == pytest.approx(2.0, abs=1e-9)
    assert np.median(waited_s) < 2.0 + 2 * RETRY_S


def test_where_all_are_admitted_nothing_changes() -> None:
    """A condition that always holds leaves every decision as it is."""
    work = poisson(200, 10.0)
    plain, held = (simulate(specs(), work, policy) for policy in ("block", 'block: hold = "predicted_e2e_s > 0"'))
    assert (plain.decisions.instance == held.decisions.instance).all()
    assert (plain.outcomes.finished_s == held.outcomes.finished_s).all()


def test_several_schedulers_hold_equally_long() -> None:
    """Of four schedulers before a cluster that is too small, none has its requests wait much longer than the others."""
    work = poisson(600, 25.0)
    result = simulate(specs(), work, LONG_HOLD, Conditions(num_schedulers=4), seed=5)
    waited_s = result.outcomes.scheduled_s - work.arrival_s
    means = [waited_s[result.decisions.scheduler == which].mean() for which in range(4)]
    assert min(means) > 1.0
    assert max(means) < 1.7 * min(means)


@pytest.mark.parametrize(("bad", "name"), [({"admission_turn": "last"}, "admission_turn"), ({"late_s": 0.0}, "late_s")])
def test_bad_conditions_are_refused(bad: dict[str, object], name: str) -> None:
    """Each by its name."""
    with pytest.raises(ValueError, match=name):
        replace(Conditions(), **bad)


@pytest.mark.parametrize(
    "policy", ['jsq: hold = "batch_size"', 'jsq: hold = "nothing < 1"', "hold: hold_s = -1", "jsq: hold = 3"]
)
def test_bad_holds_are_refused(policy: str) -> None:
    """Each by its name."""
    with pytest.raises(ValueError, match="hold"):
        simulate(specs(1), poisson(3, 1.0), policy)
