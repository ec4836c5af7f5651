"""Experiments run from TOML files, continue after an interruption, and write reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli import block
from simulator.experiments.experiment_file import experiment_from, experiment_named, experiment_names

CAPACITY = """
title = "A small one"
kind = "capacity"
seeds = 2
resolution = 0.05
first_rate = 5.0
baseline = "jsq"
policies = ["jsq", { name = "block*", policy = "block", tags = { kind = "noisy", sigma = 0.2 } }]
differences = ["all of it"]

[scenario.instances]
profile = "llama-2-7b-a30"
count = 2
engine = { max_num_seqs = 8, max_num_batched_tokens = 256, num_gpu_blocks = 200, max_model_len = 1024, enable_prefix_caching = false }

[scenario.traffic]
prompt_tokens = "uniform:16:128"
output_tokens = "uniform:16:64"
num_requests = 120

[settings.eight]

[settings.four]
instances.engine.max_num_seqs = 4

[paper.four]
jsq = 3.0
"block*" = 3.3
"""

SWEEP = CAPACITY.replace('kind = "capacity"', 'kind = "sweep"\nrates = [1, 2]\nplots = ["ttft_p99_s"]')


def run(*arguments: str) -> str:
    """Run `block experiment`, which must succeed, and return its standard output."""
    result = CliRunner().invoke(block, ["experiment", "--workers", "1", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that declares an experiment."""
    path = tmp_path / "small.toml"
    path.write_text(CAPACITY)
    return path


def test_reports_capacities_beside_the_papers(file: Path, tmp_path: Path) -> None:
    """JSON has every number by name, Markdown has the paper's numbers, HTML has charts and no external resources."""
    found = json.loads(run(str(file), "--out", str(tmp_path / "out"), "--json"))
    results = {row["name"]: row for row in found["results"]}
    assert found["bench"] == "small"
    for setting in ("eight", "four"):
        row = results[f"capacity_qps.jsq.{setting}"]
        assert row["value"] > 0
        assert row["ci95"] > 0
        assert row["n"] == 2
        assert f"gain_over_jsq.block_star.{setting}" in results
    assert results["capacity_qps.jsq.four"]["value"] < results["capacity_qps.jsq.eight"]["value"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| block* |" in markdown
    assert "+10.0%" in markdown  # the paper's
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "src=" not in page
    assert "href=" not in page


@pytest.mark.parametrize("text", [CAPACITY, SWEEP])
def test_one_seed_has_no_interval(tmp_path: Path, text: str) -> None:
    """With one seed, JSON has null intervals, and the report has a sentence instead."""
    path = tmp_path / "one.toml"
    path.write_text(text)
    found = json.loads(
        run(str(path), "--seeds", "1", "--only", "eight", "--out", str(tmp_path / "out"), "--json"),
        parse_constant=pytest.fail,
    )
    assert found["results"]
    assert all(row["ci95"] is None for row in found["results"])
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "One seed" in markdown
    assert "±" not in markdown


def test_claims_are_reported_with_measurements(tmp_path: Path) -> None:
    """The report and JSON have the paper's sentence and number, our number, and the turning points."""
    path = tmp_path / "claims.toml"
    path.write_text(
        'turn = { metric = "ttft_p99_s", limit = 0.00001 }\n' + SWEEP
        + '[[claims]]\nsays = "Faster"\npaper = "-5 %"\nmetric = "ttft_p99_s"\nof = "block*"\nover = "jsq"\nat = 2\n'
    )  # fmt: skip
    found = json.loads(run(str(path), "--only", "eight", "--out", str(tmp_path / "out"), "--json"))
    results = {row["name"]: row for row in found["results"]}
    share = results["ttft_p99_s.block_star_over_jsq.eight.2"]["value"]
    assert -1 < share < 10
    assert results["turns_at_qps.jsq.eight"]["value"] == 1.0
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert f"| Faster | -5 % | {100 * share:+.0f} % ± " in markdown
    assert "<td>Faster</td>" in (tmp_path / "out" / "report.html").read_text()


def test_capacities_are_below_the_placement_bound(tmp_path: Path) -> None:
    """With `bound = true`, there is a row for it."""
    path = tmp_path / "bound.toml"
    path.write_text("bound = true\n" + CAPACITY.replace("num_requests = 120", "num_requests = 1500"))
    found = json.loads(run(str(path), "--only", "eight", "--seeds", "1", "--out", str(tmp_path / "out"), "--json"))
    results = {row["name"]: row["value"] for row in found["results"]}
    bound = results["capacity_qps.any_placement_at_most.eight"]
    assert results["capacity_qps.jsq.eight"] < 1.1 * bound  # a run starts with empty instances
    assert "gain_over_jsq.any_placement_at_most.eight" in results
    assert "| any placement, at most |" in (tmp_path / "out" / "report.md").read_text()


def test_an_interrupted_run_continues(file: Path, tmp_path: Path) -> None:
    """Known results are not measured again, and half of them lead to the same report."""
    arguments = (str(file), "--out", str(tmp_path / "out"), "--json")
    first = run(*arguments)
    measured = tmp_path / "out" / "measured.jsonl"
    lines = measured.read_text().splitlines()
    assert run(*arguments) == first
    assert measured.read_text().splitlines() == lines
    measured.write_text("\n".join(lines[: len(lines) // 2]) + '\n{"key": "cut o')
    assert run(*arguments) == first


def test_a_variant_alone(file: Path, tmp_path: Path) -> None:
    """Its results are those that it has beside the others; what relates to variants that are left out is left out."""
    whole = json.loads(run(str(file), "--only", "eight", "--out", str(tmp_path / "whole"), "--json"))
    arguments = ("--only", "eight", "--out", str(tmp_path / "out"), "--json")
    found = json.loads(run(str(file), "--variant", "block?", *arguments))
    of_variant = {row["name"]: row for row in whole["results"] if "block_star.eight" in row["name"]}
    of_variant.pop("gain_over_jsq.block_star.eight")
    assert {row["name"]: row for row in found["results"]} == of_variant
    assert "| jsq |" not in (tmp_path / "out" / "report.md").read_text()


def test_gains_are_relative_to_a_variant_of_the_setting() -> None:
    """Where the baseline is left out, the first chosen variant of each setting takes its place."""
    chosen = experiment_named("tagger-worth").with_variants(["history*"])
    assert {one.name: chosen.baseline_of(one) for one in chosen.settings} == {
        "chat": "history",
        "code": "history, code",
    }
    for setting in chosen.settings:
        assert chosen.baseline_of(setting) in [variant.name for variant, _ in chosen.cases(setting)]
    kept = experiment_named("tagger-worth").with_variants(["history*", "unknown"])
    assert {kept.baseline_of(one) for one in kept.settings} == {"unknown"}


@pytest.mark.parametrize("option", ["--variant", "--only"])
@pytest.mark.parametrize("given", ["bloc", "x*"])
def test_an_unknown_choice_is_refused(file: Path, option: str, given: str) -> None:
    """The message names the option, and the choices that there are."""
    result = CliRunner().invoke(block, ["experiment", str(file), option, given])
    message = str(result.exception)
    assert message.startswith(f"{option}: must be one of ")
    assert f", not {given!r}" in message


def test_a_variant_of_other_settings_is_refused(tmp_path: Path) -> None:
    """It would leave nothing to measure."""
    path = tmp_path / "one.toml"
    path.write_text(CAPACITY.replace("[settings.eight]", '[settings.eight]\nonly = ["jsq"]'))
    result = CliRunner().invoke(block, ["experiment", str(path), "--only", "eight", "--variant", "block*"])
    assert str(result.exception) == "--variant: block*: in none of the chosen settings"


def test_sweeps_draw_curves(tmp_path: Path) -> None:
    """A sweep has a row for each policy, rate and metric, and a curve in the report."""
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    found = json.loads(run(str(path), "--out", str(tmp_path / "out"), "--json", "--only", "eight"))
    names = {row["name"] for row in found["results"]}
    assert {"ttft_p99_s.jsq.eight.1", "ttft_p99_s.block_star.eight.2", "preemptions.jsq.eight.2"} <= names
    assert not any(".four" in name for name in names)
    assert "<polyline" in (tmp_path / "out" / "report.html").read_text()


def test_an_experiment_has_the_scenario_of_another_one() -> None:
    """With changes of its own; an experiment that does not exist is refused."""
    text = """kind = "capacity"\npolicies = ["jsq"]\nscenario_of = "polyserve-fig6"\nscenario.instances.count = 3"""
    (own,), base = experiment_from("own", text).settings, experiment_named("polyserve-fig6").settings[0].scenario
    assert own.scenario.mix == base.mix
    assert (own.scenario.instances[0].count, base.instances[0].count) == (3, 8)
    assert own.scenario.instances[0].engine == base.instances[0].engine
    with pytest.raises(ValueError, match=r"own: scenario_of: must be one of .*, not 'polyserve-fig5'"):
        experiment_from("own", text.replace("fig6", "fig5"))


def test_shipped_experiments_can_be_read() -> None:
    """Each shipped experiment is valid and listed."""
    listed = run()
    assert "block-table2" in experiment_names()
    for name in experiment_names():
        assert experiment_named(name).title in listed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("title", "titel"), "titel"),
        (('"jsq", {', '"jqs", {'), "did you mean jsq"),
        (('kind = "capacity"', 'kind = "x"'), "kind"),
        (('baseline = "jsq"', 'baseline = "x"'), "baseline"),
        (("count = 2", "count = 0"), "count"),
        (("[settings.four]", "[settings.four"), "small"),
    ],
)
def test_bad_experiments_are_refused(change: tuple[str, str], complaint: str) -> None:
    """The error names the bad part."""
    with pytest.raises(ValueError, match=complaint):
        experiment_from("small", CAPACITY.replace(*change))


def test_unknown_experiments_are_refused_with_a_hint() -> None:
    """The error suggests the nearest name."""
    with pytest.raises(ValueError, match="did you mean block-table2"):
        experiment_named("block-table-2")


LOADS = """
kind = "sweep"
seeds = 2
rates = [0.5, 2]
plots = ["tdg_ratio"]
rivals = ["fcfs", "sjf"]
policies = [
  { name = "fcfs", policy = "round_robin" },
  { name = "sjf", policy = "round_robin", instances = { engine = { batcher = "sjf" } } },
  { name = "density", policy = "round_robin", instances = { engine = { batcher = "density" } } },
]

[scenario.instances]
profile = "llama-2-7b-a30"
engine = { max_num_seqs = 8, max_num_batched_tokens = 256, num_gpu_blocks = 200, max_model_len = 1024, enable_prefix_caching = false }

[scenario.traffic]
prompt_tokens = "uniform:16:128"
output_tokens = "uniform:16:64"
num_requests = 60

[[scenario.mix]]
name = "all"
share = 1
ttft_slo_s = 0.3
tpot_slo_s = 0.1

[settings.small]
saturated_rate = 4
"""


def test_loads_are_multiples_of_the_saturated_rate_and_rivals_are_compared(tmp_path: Path) -> None:
    """Rates in requests/s give the same numbers; the mean difference to the best rival is that of its rows."""
    file = tmp_path / "loads.toml"
    file.write_text(LOADS)
    rows = {
        row["name"]: row["value"] for row in json.loads(run(str(file), "--out", str(tmp_path), "--json"))["results"]
    }
    file.write_text(LOADS.replace("rates = [0.5, 2]", "rates = [2, 8]").replace("saturated_rate = 4", ""))
    plain = {
        row["name"]: row["value"] for row in json.loads(run(str(file), "--out", str(tmp_path), "--json"))["results"]
    }
    for load, rate in (("0.5", "2"), ("2", "8")):
        for name in ("fcfs", "sjf", "density"):
            assert rows[f"tdg_ratio.{name}.small.{load}"] == plain[f"tdg_ratio.{name}.small.{rate}"]
    differences = [
        rows[f"tdg_ratio.density.small.{load}"]
        - max(rows[f"tdg_ratio.{name}.small.{load}"] for name in ("fcfs", "sjf"))
        for load in ("0.5", "2")
    ]
    assert rows["mean_gain_over_best_baseline.density"] == pytest.approx(sum(differences) / 2)
    assert "mean_gain_over_best_baseline.sjf" not in rows
    assert rows["tdg_ratio.fcfs.small.2"] < 1
    assert "above the best rival" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("saturated_rate = 4", "saturated_rate = 0"), "saturated_rate: must be a number above 0, not 0"),
        (("saturated_rate = 4", "saturated_rate = 'x'"), "saturated_rate: must be a number above 0, not 'x'"),
        (
            ("saturated_rate = 4", "saturated_rate = 4\n[settings.two]"),
            "saturated_rate: must be given for all settings",
        ),
        (
            (
                'kind = "sweep"\nseeds = 2\nrates = [0.5, 2]\nplots = ["tdg_ratio"]\nrivals = ["fcfs", "sjf"]',
                'kind = "urgency"',
            ),
            "rates: an experiment of kind urgency needs",
        ),
        (('rivals = ["fcfs", "sjf"]', 'rivals = ["edf"]'), "rivals: must be one of the variants, not 'edf'"),
        (('rivals = ["fcfs", "sjf"]', 'rivals = ["sjf"]\nrival_metric = "gain"'), "rival_metric: must be one of "),
    ],
)
def test_wrong_loads_and_rivals_are_refused(change: tuple[str, str], error: str) -> None:
    """One line names the key."""
    with pytest.raises(ValueError, match=f"^small: {error}"):
        experiment_from("small", LOADS.replace(*change))
