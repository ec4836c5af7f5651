"""Conditions of a run: the settings of the admission queue are those of live schedulers, with the same meaning."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from scheduler.core import DecisionRules
from services.placement.settings import SchedulerSettings
from simulator.assembly import simulate, simulation
from simulator.conditions import CONDITION_NAMES, Conditions, Outage
from simulator.result import FINISHED, SHED, STATUSES, RunResult
from simulator.scenario import scenario_from
from tests.simulator.small_clusters import poisson, specs

ELSEWHERE = {
    "max_conflicts", "max_failed_reservations", "forecast_always", "without_pool", "explains",  # of live drivers
    "hand_over_s",  # hop_s, which is how long it takes
}  # fmt: skip
NEVER = 'block: hold = "num_running < 0", hold_s = 2'
QUEUE = {
    "max_held": 7, "max_held_tokens": 5000, "max_held_of_tenant": 0, "max_held_best_effort": 3,
    "max_held_real_time": 4,
    "admission_turn": "fair", "best_effort_share": 0.2,
}  # fmt: skip


def rules_of(**conditions: Any) -> DecisionRules:
    """Return the rules of a simulated scheduler."""
    read = scenario_from({"conditions": conditions}).conditions
    return simulation(specs(1), poisson(3, 1.0), "slo", read).schedulers[0].core.rules


def test_the_queue_has_the_settings_of_live_schedulers() -> None:
    """Equal names give equal rules, and no setting of the admission queue is missing."""
    names = {spec.name for spec in fields(DecisionRules)} - ELSEWHERE
    assert names <= set(CONDITION_NAMES)
    ours, live = rules_of(**QUEUE), SchedulerSettings(**QUEUE).rules()
    assert {name: getattr(ours, name) for name in names} == {name: getattr(live, name) for name in names}


def test_without_limits_any_number_waits() -> None:
    """None is any number, and 0 is none, as in live schedulers."""
    rules = rules_of()
    assert min(rules.max_held, rules.max_held_of_tenant, rules.max_held_best_effort) > 10**9
    assert rules.max_held_tokens == math.inf
    assert rules_of(max_held=0, max_held_best_effort=0).max_held_best_effort == 0


def test_old_names_are_read() -> None:
    """`turn` is `admission_turn`, and `first_come` is `arrival`; both names at once are refused."""
    assert rules_of(turn="first_come").admission_turn == "arrival"
    assert rules_of(turn="shortest").admission_turn == "shortest"
    changed = scenario_from({"conditions": {"turn": "fair"}}).changed(conditions={"turn": "deadline"})
    assert changed.conditions.admission_turn == "deadline"
    with pytest.raises(ValueError, match=r"^conditions.turn: is the old name of admission_turn"):
        rules_of(turn="fair", admission_turn="fair")
    with pytest.raises(ValueError, match=r"^admission_turn: must be one of .*, not 'shortes'; did you mean shortest\?"):
        rules_of(turn="shortes")


def waited_s(result: RunResult) -> np.ndarray:
    """Return how long each request waited until it was placed."""
    return np.asarray(result.decisions.decided_s) - result.work.arrival_s


def test_a_caller_waits_for_a_limited_time() -> None:
    """A request that no instance admits is placed when its caller would wait no longer, and at `hold_s` without one."""
    result = {max_wait_s: simulate(specs(1), poisson(30, 2.0), NEVER, Conditions(max_wait_s=max_wait_s))
              for max_wait_s in (None, 0.5, 9.0, 0.0)}  # fmt: skip
    for max_wait_s, longest_s in ((None, 2.0), (0.5, 0.5), (9.0, 2.0), (0.0, 0.0)):
        assert (result[max_wait_s].decisions.status == STATUSES.index(FINISHED)).all()
        assert waited_s(result[max_wait_s]) == pytest.approx(longest_s, abs=1e-6)


def test_a_request_that_is_placed_again_has_a_new_limit() -> None:
    """As a gateway's next call has, where the instance of the first one has failed."""
    made, work = specs(2), poisson(1, 1.0)
    plain = simulate(made, work, NEVER.replace("2", "9"), Conditions(max_wait_s=0.5))
    arrival_s = float(work.arrival_s[0])
    index = int(plain.decisions.instance[0])
    outage = Outage(instance=index, from_s=arrival_s + 0.501, until_s=arrival_s + 0.6)
    again = simulate(made, work, NEVER.replace("2", "9"), Conditions(max_wait_s=0.5, outages=(outage,)))
    assert again.decisions.num_sends[0] == 2
    assert waited_s(again)[0] == pytest.approx(1.001, abs=1e-6)


def test_too_many_tokens_may_not_wait() -> None:
    """Where `max_held_tokens` wait, requests that would rather be shed than be late are shed."""
    mix = [{"name": "a", "share": 1, "ttft_slo_s": 1.0, "tpot_slo_s": 0.06, "when_late": "shed"}]

    def num_shed(**conditions: Any) -> int:
        table = {"instances": {"profile": "llama-2-7b-a30", "engine": {"max_num_seqs": 8, "max_model_len": 2048}},
                 "traffic": {"num_requests": 100, "prompt_tokens": "200", "output_tokens": "100"},
                 "conditions": conditions, "mix": mix}  # fmt: skip
        scenario = scenario_from(table)
        result = simulate(scenario.instance_specs(), scenario.workload(8.0, 0), "slo", scenario.conditions)
        return int((result.decisions.status == STATUSES.index(SHED)).sum())

    assert num_shed(max_held_tokens=0) > num_shed()
    assert num_shed(max_held=0) == num_shed(max_held_tokens=0)
