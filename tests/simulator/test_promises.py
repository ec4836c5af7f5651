"""What schedulers promise under overload and to tenants, on the simulator's virtual clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.result import FINISHED, SHED, STATUSES, RunResult
from simulator.scenario import Scenario, scenario_from

ENGINE = {"batcher": "decode_then_edf", "max_num_seqs": 48, "max_num_batched_tokens": 512, "num_gpu_blocks": 1057,
          "max_model_len": 2048, "enable_prefix_caching": False}  # fmt: skip
CHAT = {"name": "chat", "ttft_slo_s": 1.0, "tpot_slo_s": 0.06, "when_late": "shed"}
AGENT = {"name": "agent", "ttft_slo_s": 3.0, "tpot_slo_s": 0.12, "when_late": "shed"}
BATCH = {"name": "batch", "class": "best-effort"}
MIX = [{**CHAT, "share": 4}, {**AGENT, "share": 4}, {**BATCH, "share": 2}]
CAPACITY = 18.0  # requests of the mix per second that two instances serve without shedding any


def cluster(mix: list[dict[str, Any]], num_requests: int = 600, **conditions: Any) -> Scenario:
    """Two instances, and requests of a mix."""
    return scenario_from({
        "instances": {"profile": "llama-2-7b-a30", "count": 2, "engine": ENGINE},
        "traffic": {"num_requests": num_requests, "prompt_tokens": "lognormal:200:0.6",
                    "output_tokens": "lognormal:100:0.5", "arrivals": "poisson"},
        "conditions": conditions,
        "mix": mix,
    })  # fmt: skip


def run(scenario: Scenario, rate: float, policy: str = "slo") -> RunResult:
    """Serve the scenario's requests at a rate."""
    return simulate(scenario.instance_specs(), scenario.workload(rate, 0), policy, scenario.conditions)


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
