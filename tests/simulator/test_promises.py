"""What schedulers promise under overload and to tenants, on the simulator's virtual clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.result import FINISHED, SHED, STATUSES, RunResult
from simulator.retry_accuracy import Rerun, retry_times
from simulator.run import Simulation
from simulator.scenario import Scenario, scenario_from

ENGINE = {"batcher": "decode_then_edf", "max_num_seqs": 48, "max_num_batched_tokens": 512, "num_gpu_blocks": 1057,
          "max_model_len": 2048, "enable_prefix_caching": False}  # fmt: skip
CHAT = {"name": "chat", "ttft_slo_s": 1.0, "tpot_slo_s": 0.06, "when_late": "shed"}
AGENT = {"name": "agent", "ttft_slo_s": 3.0, "tpot_slo_s": 0.12, "when_late": "shed"}
BATCH = {"name": "batch", "class": "best-effort"}
MIX = [{**CHAT, "share": 4}, {**AGENT, "share": 4}, {**BATCH, "share": 2}]
CAPACITY = 15.0  # requests of the mix per second that two instances serve in time
POLICY = "slo: backlog = 0.1"


def cluster(mix: list[dict[str, Any]], num_requests: int = 600, num_instances: int = 2, **conditions: Any) -> Scenario:
    """Instances, and requests of a mix."""
    return scenario_from({
        "instances": {"profile": "llama-2-7b-a30", "count": num_instances, "engine": ENGINE},
        "traffic": {"num_requests": num_requests, "prompt_tokens": "lognormal:200:0.6",
                    "output_tokens": "lognormal:100:0.5", "arrivals": "poisson"},
        "conditions": conditions,
        "mix": mix,
    })  # fmt: skip


def run(scenario: Scenario, rate: float, policy: str = POLICY, seed: int = 0) -> RunResult:
    """Serve the scenario's requests at a rate."""
    return simulate(scenario.instance_specs(), scenario.workload(rate, seed), policy, scenario.conditions)


def of_entry(result: RunResult, name: str) -> np.ndarray:
    """Return which requests are of an entry of the mix."""
    assert result.work.service is not None
    assert result.work.service.mix_entry is not None
    return result.work.service.mix_entry == name


def attains(result: RunResult) -> np.ndarray:
    """Return which requests got all tokens by their deadlines."""
    outcomes = result.outcomes
    return (outcomes.finished_s >= 0) & (outcomes.tokens_on_time >= outcomes.produced_tokens)


@pytest.mark.parametrize("num_schedulers", [1, 3])
@pytest.mark.parametrize("policy", ["slo", "polyserve"])
def test_every_request_is_served_or_shed(policy: str, num_schedulers: int) -> None:
    """A request of one lane that is placed while requests of others wait is sent like any other."""
    result = run(cluster(MIX, num_schedulers=num_schedulers), 1.6 * CAPACITY, policy)
    ends = Counter(STATUSES[status] for status in result.decisions.status.tolist())
    assert set(ends) == {FINISHED, SHED}
    shed = result.decisions.status == STATUSES.index(SHED)
    assert shed[of_entry(result, "chat")].any()
    assert not shed[of_entry(result, "batch")].any()
    assert attains(result)[~shed & ~of_entry(result, "batch")].mean() > 0.95


def test_waiting_requests_are_tried_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes others ready is finished first: a long queue must not become as deep a recursion."""
    tick, depths, deepest = Simulation._tick_decision, [0], [0]

    def counted(self: Simulation, *arguments: Any) -> None:
        depths.append(depths[-1] + 1)
        tick(self, *arguments)
        deepest.append(depths.pop())

    monkeypatch.setattr(Simulation, "_tick_decision", counted)
    run(cluster(MIX), 1.6 * CAPACITY)
    assert max(deepest) == 2  # the one whose time has come, and then the others in turn


def calm_attains(turn: str, times: int, share: float = 0.24 * CAPACITY) -> float:
    """Return what a tenant attains beside another one that sends so many times as much, on average of three runs."""
    tenants = [{**CHAT, "name": name, "tenant": name, "share": part} for name, part in (("calm", 1), ("loud", times))]
    scenario = cluster(tenants, 250 * (1 + times), admission_turn=turn, max_held_of_tenant=40)
    results = [run(scenario, share * (1 + times), seed=seed) for seed in range(3)]
    return float(np.mean([attains(result)[of_entry(result, "calm")].mean() for result in results]))


def test_a_tenant_that_floods_costs_another_one_nothing() -> None:
    """With fair turns the other one attains what it attained before, to two points; first come, first served not."""
    before = calm_attains("fair", 1)
    assert before > 0.98
    assert calm_attains("fair", 5) >= before - 0.02
    assert calm_attains("arrival", 5) < before - 0.2


def test_overload() -> None:
    """At twice the capacity those that are admitted get all tokens in time, and best effort gets more than its floor."""
    mix = [{**CHAT, "share": 8}, {**BATCH, "share": 2}]
    result = run(cluster(mix, 900), 2 * CAPACITY)
    status, decided_s = result.decisions.status, result.decisions.decided_s
    shed = status == STATUSES.index(SHED)
    chat, batch = of_entry(result, "chat"), of_entry(result, "batch")
    assert 0.2 < shed[chat].mean() < 0.6
    assert attains(result)[chat & ~shed].mean() >= 0.95
    assert np.isfinite(result.decisions.retry_after_s[shed]).all()
    tokens = result.work.lengths.prompt_tokens + result.work.lengths.output_tokens
    in_overload = ~shed & (decided_s < result.work.arrival_s[-1])
    assert tokens[in_overload & batch].sum() > 0.04 * tokens[in_overload].sum()
    assert not shed[batch].any()


def test_a_late_request_starts_at_once_where_nothing_else_runs() -> None:
    """Its own late tokens are no reason to wait, although it still has its targets in the forecast."""
    scenario = cluster([{**CHAT, "ttft_slo_s": 1e-3, "share": 1, "when_late": "serve"}], 6)
    result = run(scenario, 0.1, "slo")
    assert (result.decisions.decided_s - result.work.arrival_s).max() < 0.5


@pytest.mark.slow
def test_retry_after_is_about_right() -> None:
    """The median of the errors stays below half of the time after which the request would have been admitted at once."""
    scenario = cluster([{**CHAT, "share": 8}, {**BATCH, "share": 2}], 300)
    result = run(scenario, 2 * CAPACITY, "slo")
    shed = np.flatnonzero((result.decisions.status == STATUSES.index(SHED)) & (result.decisions.decided_s > 5.0))
    sample = shed[np.linspace(0, len(shed) - 1, 9).astype(int)].tolist()
    again = Rerun(specs=scenario.instance_specs(), policy="slo", conditions=scenario.conditions)
    times = list(retry_times(result, again, sample))
    assert len(times) == 9
    assert float(np.median([one.error for one in times])) < 0.5
    assert any(one.actual_s > 0.3 for one in times)


@pytest.mark.slow
def test_several_schedulers_share_a_load() -> None:
    """Each has queues of its own: no request is lost, and those that are admitted attain as much."""
    attained = {}
    for num_schedulers in (1, 8):
        result = run(cluster(MIX, 900, num_instances=4, num_schedulers=num_schedulers), 2 * CAPACITY * 1.2)
        shed = result.decisions.status == STATUSES.index(SHED)
        assert (shed | (result.decisions.status == STATUSES.index(FINISHED))).all()
        real_time = ~of_entry(result, "batch")
        assert attains(result)[real_time & ~shed].mean() > 0.98
        attained[num_schedulers] = attains(result)[real_time].mean()
    assert attained[8] > attained[1] - 0.1
