"""Real-time requests and best-effort batches on one engine."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.experiments.experiment_file import experiment_from, experiment_named
from simulator.hybrid_load import serve_hybrid
from simulator.scenario import Scenario, scenario_from

ENGINE = {
    "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_gpu_blocks": 400, "max_model_len": 1024,
    "enable_prefix_caching": False,
}  # fmt: skip


def scenario_with(batch: int, **engine: Any) -> Scenario:
    """Return an A30 that serves short requests for 20 s."""
    return scenario_from(
        {
            "instances": {"profile": "llama-2-7b-a30", "engine": {**ENGINE, **engine}},
            "traffic": {"prompt_tokens": "uniform:16:128", "output_tokens": "uniform:8:64"},
            "slo": {"ttft_s": 0.5, "tpot_s": 0.2},
            "best_effort": {
                "batch": batch, "prompt_tokens": "uniform:64:256", "output_tokens": "uniform:8:32", "for_s": 20.0,
            },
        }
    )  # fmt: skip


def test_best_effort_comes_in_batches_beside_real_time_requests() -> None:
    """Several whole batches are served, and slow real-time requests down; with their class known, less."""
    alone = serve_hybrid(scenario_with(0), 2.0, 0)
    fcfs = serve_hybrid(scenario_with(24), 2.0, 0)
    bros = serve_hybrid(scenario_with(24, batcher="bros"), 2.0, 0)
    assert alone["be_throughput"] == 0
    assert fcfs["be_throughput"] * 20 > 2 * 24
    assert bros["be_throughput"] > 0.8 * fcfs["be_throughput"]
    assert alone["rt_ttft_mean_s"] < bros["rt_ttft_mean_s"] < fcfs["rt_ttft_mean_s"]
    assert serve_hybrid(scenario_with(24), 2.0, 0) == fcfs
    assert serve_hybrid(scenario_with(24), 2.0, 1) != fcfs


def test_wrong_scenarios_are_refused() -> None:
    """One line names the field."""
    for table, error in (
        ({"batch": -1}, "best_effort.batch: must be at least 0"),
        ({"for_s": 0.0}, "best_effort.for_s: must be a number above 0, not 0.0"),
        ({"output_tokens": "long"}, "best_effort.output_tokens: 'long' is neither"),
        ({"batches": 1}, "best_effort: 'batches' is unknown"),
    ):
        with pytest.raises(ValueError, match=error):
            scenario_from({"best_effort": table})
    two = scenario_with(1).changed(instances={"count": 2})
    with pytest.raises(ValueError, match=r"instances.count: an experiment of kind hybrid has one instance, not 2"):
        serve_hybrid(two, 1.0, 0)
    with pytest.raises(ValueError, match=r"^mix: an experiment of kind hybrid"):
        serve_hybrid(scenario_with(1).changed(mix=[{"name": "a", "share": 1}]), 1.0, 0)
    with pytest.raises(ValueError, match=r"^rates: no real-time request arrives within 20 s at 1e-06/s"):
        serve_hybrid(scenario_with(1), 1e-6, 0)


def test_the_papers_experiment_names_what_it_compares() -> None:
    """Each rule is a variant of the same scenario, and each claim has its settings."""
    experiment = experiment_named("bros-fig10-13")
    assert {"vllm_v1", "priority", "first 512", "rr", "bros swap", "bros two-ended"} <= {
        variant.name for variant in experiment.variants
    }
    layouts = {
        variant.name: scenario.instance_specs()[0].config.kv_layout
        for variant, scenario in experiment.cases(experiment.settings[0])
    }
    assert layouts["bros recompute"] == "plain"
    assert layouts["bros swap"] == layouts["priority swap"] == "swap"
    assert layouts["bros two-ended"] == "bidirectional"
    settings = {setting.name for setting in experiment.settings}
    assert all(set(claim.settings) <= settings for claim in experiment.claims)


def test_a_variant_of_other_kinds_has_a_policy() -> None:
    """Only an experiment on one engine needs none."""
    text = 'kind = "KIND"\nrates = [1]\nvariants = [{ name = "one" }]\n'
    assert experiment_from("mine", text.replace("KIND", "hybrid")).variants[0].name == "one"
    with pytest.raises(ValueError, match="mine: "):
        experiment_from("mine", text.replace("KIND", "sweep"))
