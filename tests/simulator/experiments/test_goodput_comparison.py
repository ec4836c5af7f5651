"""Experiments of kind goodput choose splits, compare with the best rival, and have settings by axes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.cli import block
from simulator.experiments.experiment_file import experiment_from, experiment_named
from simulator.experiments.findings import measure
from simulator.experiments.goodput_comparison import TUNING_SEED, VariantGoodput, gains_over_best
from simulator.experiments.report import as_markdown
from simulator.goodput import Goodput, GoodputTrial

TEXT = """
kind = "goodput"
seeds = 3
resolution = 0.01
tuning_requests = 20
rivals = ["jsq", "pd_least", "pd_threshold"]
default_settings = ["small_fast"]
policies = [
  "jsq",
  { name = "pd_least", policy = "pd_least", splits = [0.25, 0.5, 0.75] },
  { name = "pd_threshold", policy = "pd_threshold", split_of = "pd_least" },
  { name = "per_request", policy = "marginal", splits = [0.25, 0.5] },
]

[scenario.instances]
profile = "llama-2-7b-a30"
count = 8
engine = { max_num_seqs = 8, kv_bytes_per_token = 1024 }

[scenario.traffic]
num_requests = 50

[[scenario.mix]]
name = "all"
share = 1
ttft_slo_s = 0.3
tpot_slo_s = 0.1

[settings.small]
first_rate = 20.0

[[axes]]
fast = { instances = { engine = { kv_transfer_bytes_per_s = 25e9 } } }
slow = { instances = { engine = { kv_transfer_bytes_per_s = 1e9 } } }
"""
GOODPUTS = {
    ("jsq", 0): 20.0, ("pd_least", 2): 18.0, ("pd_least", 4): 25.0, ("pd_least", 6): 10.0, ("pd_threshold", 4): 24.0,
    ("marginal", 2): 30.0, ("marginal", 4): 27.0,
}  # fmt: skip


def runner(_: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, float]]]:
    """Attain less the higher the rate is, as much as `GOODPUTS` says for a policy and a split."""
    for index, trial in enumerate(trials):
        known = GOODPUTS[trial.policy, trial.scenario.instances[0].num_prefill]
        assert trial.seed in (0, 1, 2, TUNING_SEED)
        assert trial.scenario.traffic.num_requests == (20 if trial.seed == TUNING_SEED else 50)
        yield index, {"attained": 0.9 * known / trial.rate, "attained_tokens": 0.8, "disaggregated": 0.5}


def test_compares_with_the_best_rival() -> None:
    """Splits are tuned by variant or taken over, and the gain is over the best of the rivals."""
    experiment = experiment_from("small", TEXT)
    found = measure(experiment, runner, lambda _, __: None)
    rows = {row.name: row for row in found.rows}
    assert rows["goodput_qps.per_request.small_fast"].value == pytest.approx(30.0, rel=0.01)
    assert rows["num_prefill.pd_least.small_fast"].value == rows["num_prefill.pd_threshold.small_fast"].value == 4
    assert rows["num_prefill.per_request.small_fast"].value == 2
    assert rows["num_prefill.jsq.small_fast"].value == 0
    assert rows["goodput_over_best_fixed.per_request.small_slow"].value == pytest.approx(0.2, abs=0.02)
    assert rows["goodput_over_best_fixed.per_request.mean"].n == 3
    text = as_markdown(experiment, found)
    assert "| per_request | 30." in text
    assert "+20" in text or "+19" in text


def by_work(work: Callable[[float], float]) -> Callable[..., Iterator[tuple[int, dict[str, float]]]]:
    """The same runner, with the share of the tokens as a function of that of the requests."""

    def run(measure: Callable[..., Any], trials: Sequence[GoodputTrial], /) -> Iterator[tuple[int, dict[str, float]]]:
        for index, found in runner(measure, trials):
            yield index, {**found, "attained_tokens": work(found["attained"])}

    return run


def test_goodput_by_work_has_names_of_its_own() -> None:
    """Where it is asked for, each number has one by work beside it, and the bound stands beside both."""
    text = TEXT.replace("seeds = 3", "seeds = 2\nwork = true").replace(
        'default_settings = ["small_fast"]', 'gain_name = "over_best"\naxis_separator = "."'
    )
    experiment = experiment_from("small", text)
    found = measure(experiment, by_work(lambda share: share / 1.1), lambda _, __: None)
    rows = {row.name: row for row in found.rows}
    for setting in ("small.fast", "small.slow"):
        assert rows[f"goodput_qps.per_request.{setting}"].value == pytest.approx(30.0, rel=0.01)
        assert rows[f"work_goodput_qps.per_request.{setting}"].value == pytest.approx(30.0 / 1.1, rel=0.01)
        assert rows[f"goodput_qps.bound.{setting}"].value > rows[f"optimum_qps.tiers.{setting}"].value > 0
        assert rows[f"work_goodput_qps.bound.{setting}"].n == 2
    for prefix in ("", "work_"):
        for name in ("over_best.per_request.mean", "over_best.per_request.lowest", "over_best_single.per_request.mean"):
            assert rows[prefix + name].value == pytest.approx(0.2, abs=0.02)
    text = as_markdown(experiment, found)
    assert "| per_request | 30." in text
    assert "| bound | " in text
    assert "tiers apart | all mixed at the strictest TPOT | prefill and decode apart | memory alone" in text


def test_names_of_results() -> None:
    """The settings of `polyserve-fig6` are named by trace and milliseconds, and it reports goodput by work."""
    experiment = experiment_named("polyserve-fig6")
    assert experiment.gain_name == "goodput_over_best"
    assert experiment.work
    assert {"uniform_4096_1024.0", "uniform_4096_1024.10", "mooncake.3"} < {one.name for one in experiment.settings}
    assert "ours" in {one.name for one in experiment.variants}


def test_a_setting_in_which_no_rival_attains_the_share_has_no_gain() -> None:
    """It does not count in the mean over settings."""

    def variant(*rates: float) -> VariantGoodput:
        return VariantGoodput(num_prefill=0, by_seed=[Goodput(rate=rate, at={}) for rate in rates])

    rivals = {"jsq": variant(0.0, 4.0), "pd_least": variant(0.0, 0.0)}
    found = {
        "small_fast": {**rivals, "per_request": variant(1.0, 4.0)},
        "small_slow": {"jsq": variant(2.0, 4.0), "per_request": variant(3.0, 4.0)},
    }
    assert gains_over_best(experiment_from("small", TEXT), found) == {("small_slow", "per_request"): [0.5, 0.0]}


def test_settings_are_products_of_axes() -> None:
    """Each value of an axis gives a setting; those that are not default are optional."""
    settings = {one.name: one for one in experiment_from("small", TEXT).settings}
    assert {name: one.optional for name, one in settings.items()} == {"small_fast": False, "small_slow": True}
    slow = settings["small_slow"].scenario.instance_specs()[0].config
    assert slow.kv_transfer_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('split_of = "pd_least"', 'split_of = "jsq"'), "split_of"),
        (("[0.25, 0.5, 0.75]", "[0.25, 1.5]"), "splits"),
        (('default_settings = ["small_fast"]', 'default_settings = ["small"]'), "default_settings"),
        (("resolution = 0.01", "resolution = 0.01\nattained = 2"), "attained"),
        (("resolution = 0.01", "resolution = 0.01\nwork = 1"), "work: must be true or false"),
        (("resolution = 0.01", 'resolution = 0.01\naxis_separator = "-"'), "axis_separator"),
    ],
)
def test_bad_experiments_are_refused(change: tuple[str, str], complaint: str) -> None:
    """The error names the bad part."""
    with pytest.raises(ValueError, match=complaint):
        experiment_from("small", TEXT.replace(*change))


def test_what_is_attained_at_a_rate(tmp_path: Path) -> None:
    """Each variant runs once for each rate and seed; a share that is out of reach is an upper bound."""
    path = tmp_path / "small.toml"
    path.write_text(TEXT.replace("seeds = 3", "seeds = 2").replace("num_requests = 50", "num_requests = 600"))
    arguments = ["experiment", str(path), "--variant", "jsq", "--out", str(tmp_path), "--rate", "1", "--rate", "500"]
    result = CliRunner().invoke(block, [*arguments, "--json"], catch_exceptions=False)
    rows = json.loads(result.stdout)
    keys = [(row["setting"], row["variant"], row["rate"], row["seed"]) for row in rows]
    assert keys == [("small_fast", "jsq", rate, seed) for rate in (1.0, 500.0) for seed in (0, 1)]
    assert all(row["attained"] >= 0.9 for row in rows[:2])
    assert [row["is_stopped"] for row in rows] == [False, False, True, True]
    assert all(row["attained"] < 0.9 for row in rows[2:])
    assert [row["admitted"] for row in rows] == [0.0, 0.0, None, None]  # `jsq` asks for no forecast
    assert all(row["admitted_missed"] is None for row in rows)
    assert "| small_fast | jsq | 1 | 500 | < " in CliRunner().invoke(block, arguments, catch_exceptions=False).stdout


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TEXT, ["--variant", "jsq", "--rate", "0"], "--rate: must be above 0"),
        (TEXT, ["--rate", "9"], "--rate: small chooses prefill instances by a search"),
        (None, ["--rate", "9"], "--rate: block-table2 does not search for a goodput"),
    ],
)
def test_rates_that_cannot_be_run_are_refused(
    tmp_path: Path, text: str | None, options: list[str], message: str
) -> None:
    """The message names the option."""
    path = tmp_path / "small.toml"
    path.write_text(text or "")
    name = str(path) if text else "block-table2"
    result = CliRunner().invoke(block, ["experiment", name, "--out", str(tmp_path), *options])
    assert str(result.exception) == message
