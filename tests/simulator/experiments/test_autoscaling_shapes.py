"""The provisioning experiment: its load shapes, which rule dominates which, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.provisioning.schedule import parse_schedule
from services.result_files import write_report
from simulator.autoscaling import STATIC, Change
from simulator.experiments import autoscaling_shapes
from simulator.experiments.autoscaling_comparison import (
    dominated_shapes,
    dominates,
    ratios,
    seeds_dominated,
    sizes_over_time,
)
from simulator.experiments.autoscaling_shapes import LoadShape, ShapeRun, direction_changes, require_rules, run_shape
from simulator.experiments.experiment import Experiment
from simulator.experiments.experiment_file import experiment_from, experiment_named
from simulator.experiments.findings import measure
from simulator.experiments.report import as_json, as_markdown
from simulator.scenario import scenario_from

SMALL = """
kind = "provisioning"
seeds = 2
first_seed = 7
policies = ["block"]
rules = ["static", "relief", "preempt", "headroom", "schedule@2.5"]

[scenario.instances]
profile = "llama-2-7b-a30"
count = 3
engine = { max_num_seqs = 8, max_num_batched_tokens = 256, num_gpu_blocks = 200, max_model_len = 1024, enable_prefix_caching = false }

[scenario.traffic]
prompt_tokens = "uniform:16:128"
output_tokens = "uniform:16:64"

[settings.fig8]
[settings.step]
[settings.step_cold300]
"""
SHORT = LoadShape(name="short", first=1, rates=((0.0, 1.0), (40.0, 6.0)), seconds=80.0, cold_start_s=5.0)


def small() -> Experiment:
    """A small cluster under three load shapes."""
    return experiment_from("small", SMALL)


def no_progress(*_: int) -> None:
    """Ignore progress."""


def fake_runner(seen: list[ShapeRun]) -> Callable[..., Iterator[tuple[int, dict[str, Any]]]]:
    """Return a runner with fixed results: relief is the slowest rule; headroom costs more with long cold starts."""

    def runner(_: Callable[..., Any], tasks: Sequence[ShapeRun], /) -> Iterator[tuple[int, dict[str, Any]]]:
        seen.extend(tasks)
        for index, run in enumerate(tasks):
            latency = {"static": 4.0, "headroom": 5.0, "preempt": 6.0, "relief": 8.0}.get(run.rule, 5.0)
            cost = 1.5 if run.rule == "headroom" and run.shape.cold_start_s == 300.0 else 1.0
            yield (
                index,
                {
                    "p99_e2e_s": latency * 10 + run.seed,
                    "over_threshold_requests": latency,
                    "instance_s": 1000.0 * cost,
                    "most_instances": 3.0,
                    "changes_per_h": 2.0,
                    "turns": 0.0,
                    "timeline": [[0.0, 1], [100.0, 3]],
                },
            )

    return runner


def test_a_rule_dominates_if_it_is_no_worse_in_any_number() -> None:
    """Headroom dominates if it is neither slower nor more expensive than either rule of the paper, on average."""
    good, bad = {"p99_e2e_s": 50.0, "instance_s": 100.0}, {"p99_e2e_s": 80.0, "instance_s": 99.0}
    case = {("step", rule): [good, good] for rule in autoscaling_shapes.RULES}
    assert dominates(case, "step")
    assert seeds_dominated(case, "step") == (2, 2)
    case["step", "relief"] = [good, bad]
    assert not dominates(case, "step")
    assert seeds_dominated(case, "step") == (1, 2)
    assert dominated_shapes(case) == {"": ([], ["step"])}
    assert ratios(case)["instance_s.headroom_over_relief.step"] == [1.0, 100.0 / 99.0]


def test_shapes_have_the_number_of_requests_of_their_rates() -> None:
    """The paper's shape has ten thousand requests; there are five shapes, and five with long cold starts."""
    by_name = {shape.name: shape for shape in autoscaling_shapes.ALL_SHAPES}
    assert by_name["fig8"].num_requests == 10_000
    assert by_name["step"].num_requests == 12 * 300 + 24 * 900
    assert len(autoscaling_shapes.SHAPES) == len(autoscaling_shapes.COLD_SHAPES) == 5
    assert {*autoscaling_shapes.SHAPES, *autoscaling_shapes.COLD_SHAPES} <= by_name.keys()
    assert {by_name[name].cold_start_s for name in autoscaling_shapes.COLD_SHAPES} == {300.0}
    assert {setting.name for setting in experiment_named("block-fig8").settings} == by_name.keys()


def test_a_shape_has_a_schedule_of_its_peaks() -> None:
    """Each minute has the instances that its highest rate needs."""
    peaks = parse_schedule(SHORT.peaks(2.5))
    assert [(peak.from_s, peak.until_s, peak.num) for peak in peaks] == [(0.0, 120.0, 3)]
    step = next(shape for shape in autoscaling_shapes.ALL_SHAPES if shape.name == "step")
    assert step.peaks(4.0) == "00:00-00:05=3; 00:05-00:20=6"


@pytest.mark.parametrize("rule", [STATIC, "relief@2", "headroom", "schedule@2.5"])
def test_a_shape_is_simulated_under_a_rule(rule: str) -> None:
    """All numbers are reported; a cluster that grows starts small, and a rule's threshold is used."""
    base = scenario_from({"instances": {"profile": "llama-2-7b-a30", "count": 3},
                          "traffic": {"prompt_tokens": "uniform:16:128", "output_tokens": "uniform:64:256"}})  # fmt: skip
    found = run_shape(ShapeRun(scenario=base, shape=SHORT, rule=rule, max_instances=3, seed=1, code=""))
    assert {*autoscaling_shapes.NUMBERS, "timeline"} == found.keys()
    assert found["timeline"][0] == [0.0, 3 if rule == STATIC else 1]
    assert found["p99_e2e_s"] > 0
    if rule == STATIC:
        assert found["changes_per_h"] == found["turns"] == 0
    elif rule != "headroom":  # headroom need not grow: one engine is enough
        assert found["most_instances"] > 1


def test_direction_changes() -> None:
    """Growing twice is none, growing and shrinking is one."""

    def sized(*nums: int) -> list[Change]:
        return [Change(time_s=0.0, num_present=num, why="") for num in nums]

    assert direction_changes(2, []) == 0
    assert direction_changes(2, sized(3, 5, 6)) == 0
    assert direction_changes(2, sized(3, 5, 4, 3)) == 1
    assert direction_changes(2, sized(3, 2, 3)) == 2


def test_sizes_are_averaged_over_time() -> None:
    """One cluster grew at seven seconds, and one did not."""
    drawn = sizes_over_time([[[0.0, 2], [7.0, 4]], [[0.0, 2]]], 10.0)
    assert [(at_s, num) for at_s, num, _ in drawn] == [(0.0, 2.0), (5.0, 2.0), (10.0, 3.0)]


def test_seeds_start_at_first_seed() -> None:
    """A static cluster is simulated once for all cold starts."""
    seen: list[ShapeRun] = []
    measure(small(), fake_runner(seen), no_progress)
    assert {run.seed for run in seen} == {7, 8}
    assert len(seen) == len(set(seen))
    static = [run for run in seen if run.rule == STATIC]
    assert len(static) == 2 * 2  # two seeds of fig8, and of both step shapes


def test_findings_name_the_dominated_shapes(tmp_path: Path) -> None:
    """Shapes with long cold starts are counted separately; ratios have intervals; the report has all of it."""
    findings = measure(small(), fake_runner([]), no_progress)
    rows = {row["name"]: row for row in as_json(small(), findings)["results"]}
    assert rows["headroom.dominates_shapes"]["value"] == 2
    assert rows["headroom.dominates_shapes"]["n"] == 2
    assert rows["headroom.dominates_shapes_cold300"]["value"] == 0
    assert rows["headroom.dominates_seeds.step"]["value"] == 2
    assert rows["p99_e2e_s.preempt"]["value"] == rows["p99_e2e_s.preempt.fig8"]["value"] == 67.5
    assert rows["p99_e2e_s.preempt_over_relief"]["value"] == pytest.approx((67 / 87 + 68 / 88) / 2)
    assert rows["p99_e2e_s.preempt_over_relief"]["ci95"] > 0
    assert rows["over_threshold_requests.preempt_over_relief"]["value"] == 0.75
    text = as_markdown(small(), findings)
    assert "| step_cold300 | p99 e2e s |" in text
    assert "| headroom.dominates_shapes | 2.0 | of 2 shapes |" in text
    write_report(small(), findings, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3  # instances over time, one chart per shape
    assert json.loads((tmp_path / "results.json").read_text())["bench"] == "small"


@pytest.mark.parametrize(
    "rule", ["unknown", "relief@", "relief@-1", "relief@x", "static@70", "schedule", "preempt@inf"]
)
def test_invalid_rules_are_refused(rule: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match="^rules: "):
        require_rules([rule])


def test_first_seed_is_at_least_0() -> None:
    """A negative seed is refused."""
    with pytest.raises(ValueError, match="first_seed"):
        experiment_from("small", SMALL.replace("first_seed = 7", "first_seed = -1"))
    assert replace(small(), first_seed=0).first_seed == 0
