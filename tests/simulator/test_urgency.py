"""Urgent and normal requests over time."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.replay import replay
from simulator.scenario import Scenario, scenario_from
from simulator.urgency import count_urgent, requests_of

ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "enable_prefix_caching": False}


def scenario_with(**engine: Any) -> Scenario:
    """Return an A30 that serves short requests with targets."""
    return scenario_from(
        {
            "instances": {
                "profile": "llama-2-7b-a30", "count": 1, "engine": {**ENGINE, "batcher": "slide_batching", **engine},
            },
            "traffic": {"prompt_tokens": "uniform:64:256", "output_tokens": "uniform:32:64", "num_requests": 200},
            "mix": [
                {"name": "high", "share": 1, "priority": 0, "weight": 2.0, "ttft_slo_s": 4.0, "tpot_slo_s": 0.2},
                {"name": "any time", "share": 1, "priority": 1},
            ],
        }
    )  # fmt: skip


def test_all_requests_are_counted() -> None:
    """Who has arrived and not ended is urgent or normal; who came during the step in flight is not counted yet."""
    scenario = scenario_with()
    found = count_urgent(scenario, 24.0, 0)
    spec = scenario.instance_specs()[0]
    requests = requests_of(scenario.workload(24.0, 0))
    outcomes = replay(spec.config, spec.step_time, requests)
    longest_step_s = 0.5
    for (time_s, urgent, _), (_, normal, _) in zip(*found["over_time"].values(), strict=True):
        ended = sum(outcome.finished_s <= time_s for outcome in outcomes if outcome.finished_s is not None)
        arrived = [
            sum(request.arrival_s <= until_s for request in requests) for until_s in (time_s - longest_step_s, time_s)
        ]
        assert arrived[0] - ended <= urgent + normal <= arrived[1] - ended
    assert found["num_urgent"] > 1
    assert found["num_normal"] > 1


def test_more_are_urgent_in_overload() -> None:
    """Requests without targets never are; of the others, the more the longer the queue."""
    light, heavy = (count_urgent(scenario_with(), rate, 0) for rate in (1.0, 40.0))
    assert light["urgent_share"] < 0.1 < heavy["urgent_share"] <= 0.6


def test_another_rule_or_several_instances_are_refused() -> None:
    """One line names the setting."""
    with pytest.raises(ValueError, match=r"^instances.engine.batcher: .* needs slide_batching"):
        count_urgent(scenario_with(batcher="edf"), 1.0, 0)
    with pytest.raises(ValueError, match=r"^traffic: all requests arrive within 1 s"):
        count_urgent(scenario_with(), 1e6, 0)
    with pytest.raises(ValueError, match=r"^instances.count: "):
        count_urgent(scenario_with().changed(instances={"count": 2}), 1.0, 0)
