"""Experiments of kind cost find the smallest cluster for each policy, and what instances in tiers cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simulator.experiments.cost_comparison import OPTIMUM
from simulator.experiments.experiment_file import experiment_from, experiment_named
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
count = 40
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
NUM_INSTANCES = 40
# the smallest size that attains the share, by policy and rate, for each seed
SIZES = {
    ("jsq", 4.0): (3, 5), ("block_ttft", 4.0): (2, 2), ("random", 4.0): (40, 39), ("slo", 4.0): (1, 1),
    ("jsq", 8.0): (21, 17), ("block_ttft", 8.0): (30, 8), ("random", 8.0): (12, 99), ("slo", 8.0): (5, 6),
}  # fmt: skip


def test_finds_the_smallest_cluster_that_attains_the_share() -> None:
    """Also where it is the smallest or the largest one; a policy for which all are too small with a seed has no cost."""
    sizes: list[int] = []

    def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, float]]]:
        for index, trial in enumerate(trials):
            num = trial.scenario.instances[0].count
            assert trial.rate is not None
            assert trial.warm_up_s == 5.0
            if trial.tiers:
                assert [tier.name for tier in trial.tiers] == ["strict", "80ms"]
                assert num == NUM_INSTANCES
                yield index, {"attained": 0.99, "attained_tokens": 0.98, "num_serving": 2.5}
                continue
            sizes.append(num)
            attained = 0.9 if num >= SIZES[trial.policy, trial.rate][trial.seed - 7] else 0.89
            yield index, {"attained": attained, "attained_tokens": 0.8}

    experiment = experiment_from("small", "first_seed = 7\n" + TEXT)
    found = measure(experiment, runner, lambda _, __: None)
    rows = {row.name: row for row in found.rows}
    for (name, rate), each in SIZES.items():
        key = f"{name}.small.{rate:g}"
        if max(each) > NUM_INSTANCES:
            assert f"num_instances.{key}" not in rows
            continue
        assert rows[f"num_instances.{key}"].value == sum(each) / 2
        assert rows[f"instance_s_per_request.{key}"].value == pytest.approx(sum(each) / 2 / rate)
    assert rows["instance_s_per_request.slo_tiers.small.4"].value == pytest.approx(2.5 / 4)
    assert rows["saved_over_best.slo.small.4"].value == pytest.approx(0.5)
    assert rows["saved_over_best.slo_tiers.small.8"].value == pytest.approx((2 - 2.5 / 21 - 2.5 / 17) / 2)
    assert rows[f"instance_s_per_request.{slug(OPTIMUM)}.small.4"].value > 0
    assert len(sizes) < 8 * 2 * len(SIZES)  # one by one it would be 300
    text = as_markdown(experiment, found)
    assert "| instance-seconds per request · small | 4 | 8 |" in text
    assert "| random |" in text


def test_instances_in_the_pool_cost_nothing() -> None:
    """Of forty instances, those without requests are in the pool: few more are in tiers than a fixed cluster needs."""
    experiment = experiment_from("small", TEXT.replace("seeds = 2", "seeds = 1")).with_variants(["slo", "slo_tiers"])
    rows = {row.name: row for row in measure(experiment, one_by_one, lambda _, __: None).rows}
    for rate in (4, 8):
        fixed, moved = (rows[f"num_instances.{name}.small.{rate}"].value for name in ("slo", "slo_tiers"))
        assert 0.5 * fixed < moved < 3 * fixed < NUM_INSTANCES


def test_an_optimum_that_does_not_exist_is_left_out() -> None:
    """Where the mean request does not fit into memory, the search begins with all instances."""
    experiment = experiment_from(
        "small", TEXT.replace("max_num_seqs = 8", "max_num_seqs = 8, num_gpu_blocks = 30, max_model_len = 400")
        .replace("uniform:1:200", "300", 1)
    ).with_variants(["jsq"])  # fmt: skip
    found = measure(experiment, lambda _, trials: ((place, {"attained": 0.5}) for place in range(len(trials))),
                    lambda _, __: None)  # fmt: skip
    assert found.rows == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('kind = "cost"', 'kind = "goodput"'), "policies.tiers: experiments of kind goodput have none"),
        (("rates = [4, 8]", ""), "rates: an experiment of kind cost needs at least one"),
        (("tpot_slo_s = 0.05", "tpot_slo_s = -1"), "policies.tiers: .*tier.0..tpot_slo_s"),
        (('name = "strict"', 'name = "80ms"'), "policies.tiers: tier.1..name: '80ms' is a duplicate"),
        (("tpot_slo_s = 0.05", "tpot = 0.05"), "policies.tiers: .*tpot"),
        (("tpot_slo_s = 0.05", "tpot_slo_s = 0.05, min_instances = 41"), "min_instances: 41 in sum are more"),
        (("seeds = 2", "seeds = 2\nsaturated_rate = 9.0"), "saturated_rate: experiments of kind cost have none"),
        (("seeds = 2", "seeds = 2\nwork = true"), "work: experiments of kind cost have none"),
        (
            ('policy = "slo", tiers', 'policy = "slo", splits = [0.5], tiers'),
            "policies.splits: experiments of kind cost",
        ),
    ],
)
def test_bad_experiments_are_refused(change: tuple[str, str], complaint: str) -> None:
    """The error names the bad part."""
    with pytest.raises(ValueError, match=complaint):
        experiment_from("small", TEXT.replace(*change, 1))


def test_the_shipped_experiment() -> None:
    """Clusters with tiers stand beside fixed ones with the same policy; each TPOT target of the mix has a tier."""
    experiment = experiment_named("polyserve-fig8")
    by_name = {one.name: one for one in experiment.variants}
    for name in ("ours", "polyserve"):
        assert not by_name[name].tiers
        assert by_name[name].policy == by_name[f"{name}_tiers"].policy
        assert [tier.tpot_slo_s for tier in by_name[f"{name}_tiers"].tiers] == sorted(
            {entry.tpot_slo_s for entry in experiment.settings[0].scenario.mix if entry.tpot_slo_s}
        )
    assert not set(experiment.rivals) & {"ours", "ours_tiers"}
