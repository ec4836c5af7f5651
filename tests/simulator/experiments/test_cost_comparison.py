"""Experiments of kind cost find the smallest cluster for each policy, and what instances in tiers cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulator.experiments.cost_comparison import OPTIMUM
from simulator.experiments.experiment import experiment_from, experiment_named
from simulator.experiments.findings import measure, slug
from simulator.experiments.report import as_markdown
from simulator.goodput import GoodputTrial
from simulator.parallel import one_by_one

TEXT = """
kind = "cost"
seeds = 2
rates = [4, 8]
warm_up_s = 5.0
rivals = ["jsq", "block_ttft", "random"]
policies = [
  "jsq",
  "block_ttft",
  "random",
  "slo",
  { name = "slo_tiers", policy = "slo", tiers = [{ name = "strict", tpot_slo_s = 0.05 }, { name = "80ms", tpot_slo_s = 0.08 }] },
]

[scenario.instances]
profile = "llama-2-7b-a30"
count = 12
engine = { max_num_seqs = 8 }

[scenario.traffic]
num_requests = 60
prompt_tokens = "uniform:1:200"
output_tokens = "uniform:1:200"

[[scenario.mix]]
name = "all"
share = 1
ttft_slo_s = 0.5
tpot_slo_s = 0.08

[settings.small]
"""
SIZES = {("jsq", 4.0): 3, ("block_ttft", 4.0): 2, ("random", 4.0): 12, ("slo", 4.0): 1,
         ("jsq", 8.0): 7, ("block_ttft", 8.0): 8, ("random", 8.0): 99, ("slo", 8.0): 5}  # fmt: skip


def test_finds_the_smallest_cluster_that_attains_the_share() -> None:
    """Also where it is the smallest or the largest one; a policy for which all are too small has no cost."""
    sizes: list[int] = []

    def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, float]]]:
        for index, trial in enumerate(trials):
            num = trial.scenario.instances[0].count
            assert trial.rate is not None
            assert trial.warm_up_s == 5.0
            if trial.tiers:
                assert [tier.name for tier in trial.tiers] == ["strict", "80ms"]
                yield index, {"attained": 0.99, "attained_tokens": 0.98, "num_serving": 2.5}
                continue
            sizes.append(num)
            attained = 0.9 if num >= SIZES[trial.policy, trial.rate] else 0.89
            yield index, {"attained": attained, "attained_tokens": 0.8}

    experiment = experiment_from("small", TEXT)
    found = measure(experiment, runner, lambda _, __: None)
    rows = {row.name: row for row in found.rows}
    for (name, rate), size in SIZES.items():
        key = f"{name}.small.{rate:g}"
        if size > 12:
            assert f"num_instances.{key}" not in rows
            continue
        assert rows[f"num_instances.{key}"].value == size
        assert rows[f"instance_s_per_request.{key}"].value == pytest.approx(size / rate)
        assert rows[f"attained.{key}"].n == 2
    assert rows["instance_s_per_request.slo_tiers.small.4"].value == pytest.approx(2.5 / 4)
    assert rows["saved_over_best.slo.small.4"].value == pytest.approx(0.5)
    assert rows["saved_over_best.slo_tiers.small.8"].value == pytest.approx(1 - 2.5 / 7)
    assert rows[f"instance_s_per_request.{slug(OPTIMUM)}.small.4"].value > 0
    assert len(sizes) <= 7 * 2 * len(SIZES)
    text = as_markdown(experiment, found)
    assert "| instance-seconds per request · small | 4 | 8 |" in text
    assert "| random | 3.00 |  |" in text


def test_instances_in_the_pool_cost_nothing() -> None:
    """Of twelve instances, those without requests are in the pool; the others are in tiers, and attain as much."""
    experiment = experiment_from("small", TEXT.replace("seeds = 2", "seeds = 1")).with_variants(["slo", "slo_tiers"])
    rows = {row.name: row for row in measure(experiment, one_by_one, lambda _, __: None).rows}
    for rate in (4, 8):
        assert 0.5 < rows[f"num_instances.slo_tiers.small.{rate}"].value < 8
        assert rows[f"attained.slo_tiers.small.{rate}"].value >= 0.9
        assert rows[f"attained.slo.small.{rate}"].value >= 0.9


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('kind = "cost"', 'kind = "goodput"'), "policies.tiers: experiments of kind goodput have none"),
        (("rates = [4, 8]", ""), "rates: an experiment of kind cost needs at least one"),
        (("tpot_slo_s = 0.05", "tpot_slo_s = -1"), "policies.tiers: .*tier.0..tpot_slo_s"),
        (('name = "strict"', 'name = "80ms"'), "policies.tiers: tier.1..name: '80ms' is there twice"),
        (("tpot_slo_s = 0.05", "tpot = 0.05"), "policies.tiers: .*tpot"),
    ],
)
def test_bad_experiments_are_refused(change: tuple[str, str], complaint: str) -> None:
    """The error names the bad part."""
    with pytest.raises(ValueError, match=complaint):
        experiment_from("small", TEXT.replace(*change, 1))


def test_names_of_results() -> None:
    """The shipped experiment has the paper's rival with several budgets, and clusters with tiers beside fixed ones."""
    experiment = experiment_named("polyserve-fig8")
    names = {one.name for one in experiment.variants}
    assert {"co_chunk_512", "co_chunk_4096", "polyserve_tiers", "ours", "ours_tiers"} < names
    assert "jsq" in experiment.rivals
    assert {"uniform_4096_1024.0", "uniform_4096_1024.10"} < {one.name for one in experiment.settings}
