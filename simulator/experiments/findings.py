"""The results of an experiment: its simulations are run and summarised as named numbers and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simulator.assembly import simulate
from simulator.capacity import Capacity, Search, capacities, gain, half_width
from simulator.experiments import autoscaling_comparison, autoscaling_shapes, cost_comparison, goodput_comparison
from simulator.experiments.claims import Claim, ClaimResult, Read, Turn, evaluate, turning_points
from simulator.experiments.experiment import Experiment, ExperimentSetting
from simulator.experiments.experiment_metrics import (
    CAPACITY,
    COST,
    FORECASTS,
    GOODPUT,
    HYBRID,
    PROVISIONING,
    URGENCY,
    metrics_of,
)
from simulator.forecast_accuracy import forecast_accuracy
from simulator.hybrid_load import serve_hybrid
from simulator.metrics import cdf, latencies, summary
from simulator.parallel import Runner
from simulator.placement_bound import sustained_rate
from simulator.scenario import Scenario, as_table
from simulator.urgency import count_urgent

BOUND = "any placement, at most"
URGENCY_OVER_TIME = "urgent and normal requests over time"

OnProgress = Callable[[int, int], None]
Curves = dict[str, dict[str, dict[str, list[tuple[float, float, float]]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    scenario: Scenario
    policy: str
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number, with half its 95 % confidence interval."""

    name: str
    value: float
    unit: str
    n: int
    ci95: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRival:
    """The best rival at a setting and rate, and by how much each other variant is above it, one number per seed."""

    setting: str
    rate: float
    name: str
    value: float
    differences: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of an experiment: named numbers, and curves of (x, y, ci95) by plot, setting and variant."""

    rows: list[Row]
    curves: Mapping[str, Mapping[str, Mapping[str, list[tuple[float, float, float]]]]]
    claims: Sequence[tuple[Claim, Sequence[ClaimResult]]] = ()
    best_rivals: Sequence[BestRival] = ()
    goodput: goodput_comparison.Found = field(default_factory=dict)
    bounds: goodput_comparison.Bounds = field(default_factory=dict)


def measure(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    """Run all simulations of an experiment; `on_progress` is called with the number done and the total."""
    runner = _from_seed(experiment.first_seed, runner)
    if experiment.kind == PROVISIONING:
        return _provisioning(experiment, runner, on_progress)
    kinds = {CAPACITY: _capacities, GOODPUT: _goodput, COST: _costs}
    return kinds.get(experiment.kind, _sweep)(experiment, runner, on_progress)


def _from_seed(first_seed: int, runner: Runner) -> Runner:
    """Add the experiment's first seed to the seeds of all tasks."""

    def shifted(measure: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[tuple[int, Any]]:
        yield from runner(measure, [replace(task, seed=task.seed + first_seed) for task in tasks])

    return shifted


def _provisioning(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    names = [setting.name for setting in experiment.settings]
    scenario = experiment.settings[0].scenario
    found = autoscaling_shapes.measure_shapes(
        as_table(scenario), names, experiment.rules, experiment.seeds, runner=runner, on_progress=on_progress
    )
    rows: list[Row] = []
    curves: Curves = {}
    for (shape, rule), results in found.items():
        for number, unit in zip(autoscaling_shapes.NUMBERS, autoscaling_shapes.UNITS, strict=True):
            rows.append(_mean_row(f"{number}.{rule}.{shape}", [one[number] for one in results], unit))
            if shape == autoscaling_shapes.FIGURE:
                rows.append(replace(rows[-1], name=f"{number}.{rule}"))
    until_s = {shape.name: shape.seconds for shape in autoscaling_shapes.ALL_SHAPES}
    for (shape, rule), results in found.items():
        sizes = autoscaling_comparison.sizes_over_time([one["timeline"] for one in results], until_s[shape])
        curves.setdefault(autoscaling_shapes.OVER_TIME, {}).setdefault(shape, {})[rule] = sizes
    return Findings(rows=rows + comparison_rows(found), curves=curves)


def comparison_rows(found: autoscaling_comparison.Results) -> list[Row]:
    """Compare rules: the paper's two with each other, and headroom with both."""
    rows = [_mean_row(name, values, "ratio") for name, values in autoscaling_comparison.ratios(found).items()]
    for suffix, (dominated, run) in autoscaling_comparison.dominated_shapes(found).items():
        num, unit = len(dominated), f"of {len(run)} shapes"
        rows.append(Row(name=f"headroom.dominates_shapes{suffix}", value=num, unit=unit, n=len(run)))
        for shape in run:
            num, of = autoscaling_comparison.seeds_dominated(found, shape)
            rows.append(Row(name=f"headroom.dominates_seeds.{shape}", value=num, unit=f"of {of} seeds", n=of))
    return rows


def _mean_row(name: str, values: Sequence[float], unit: str) -> Row:
    half = half_width(values) if len({*values}) > 1 else None  # equal values give no interval
    return Row(name=name, value=float(np.mean(values)), unit=unit, n=len(values), ci95=half)


def _capacities(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    rows: list[Row] = []
    bars: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    num_cases = sum(len(experiment.cases(setting)) for setting in experiment.settings)
    estimate = num_cases * experiment.seeds * 10  # number of trials
    num_trials = 0

    def on_trial(*_: object) -> None:
        nonlocal num_trials
        num_trials += 1
        on_progress(min(num_trials, estimate - 1), estimate)

    for setting in experiment.settings:
        cases = experiment.cases(setting)
        search = Search(
            resolution=experiment.resolution,
            seeds=experiment.seeds,
            max_seeds=experiment.seeds,
            first_rate=setting.first_rate,
            paired=True,
        )
        found = capacities(
            [(scenario, variant.policy) for variant, scenario in cases], experiment.objective, search, runner, on_trial
        )
        by_name = {variant.name: one for (variant, _), one in zip(cases, found, strict=True)}
        if experiment.bound:
            by_name[BOUND] = _bound(experiment, setting)
        rows += _capacity_rows(by_name, setting.name, experiment.baseline_of(setting))
        bars[setting.name] = {
            name: [(0.0, one.mean, one.ci95 if experiment.seeds > 1 else 0.0)] for name, one in by_name.items()
        }
    on_progress(estimate, estimate)
    return Findings(rows=rows, curves={"capacity": bars})


def _goodput(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    bounds = goodput_comparison.bounds_of(experiment)
    found = goodput_comparison.compare(experiment, runner, on_progress)
    units = dict.fromkeys(("goodput_qps", "work_goodput_qps", "optimum_qps"), "requests/s")
    units["num_prefill"] = "instances"
    rows = [
        _mean_row(f"{metric}.{slug(variant)}.{setting}", values, units.get(metric, "ratio"))
        for (metric, variant, setting), values in goodput_comparison.numbers_of(experiment, found, bounds).items()
    ]
    if experiment.rivals:
        rows += _rival_rows(experiment.gain_name, experiment, found)
        if experiment.work:
            rows += _rival_rows(f"work_{experiment.gain_name}", experiment, goodput_comparison.by_work(found))
    curves: Curves = {"goodput": {}}
    for setting, variants in found.items():
        curves["goodput"][setting] = {
            name: [(0.0, float(np.mean(one.rates)), half_width(one.rates) if len(one.rates) > 1 else 0.0)]
            for name, one in variants.items()
        }
    return Findings(rows=rows, curves=curves, goodput=found, bounds=bounds)


def _costs(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    found = cost_comparison.compare(experiment, runner, on_progress)
    units = {cost_comparison.COST: "s", cost_comparison.NUM_INSTANCES: "instances"}
    rows: list[Row] = []
    curves: Curves = {}
    for metric, by_case in found.items():
        for (setting, variant, rate), values in by_case.items():
            row = _mean_row(f"{metric}.{slug(variant)}.{setting}.{rate:g}", values, units.get(metric, "ratio"))
            rows.append(row)
            point = (rate, row.value, row.ci95 or 0.0)
            curves.setdefault(metric, {}).setdefault(setting, {}).setdefault(variant, []).append(point)
    for (setting, variant, rate), values in cost_comparison.savings(experiment, found).items():
        rows.append(_mean_row(f"saved_over_best.{slug(variant)}.{setting}.{rate:g}", values, "ratio"))
    return Findings(rows=rows, curves=curves)


def _rival_rows(name: str, experiment: Experiment, found: goodput_comparison.Found) -> list[Row]:
    """Compare with the best rival of each setting, and with the one that is best over all."""
    gains = goodput_comparison.gains_over_best(experiment, found)
    rows = [_mean_row(f"{name}.{slug(variant)}.{setting}", values, "ratio")
            for (setting, variant), values in gains.items()]  # fmt: skip
    single = goodput_comparison.gains_over_best_single(experiment, found)
    for variant in dict.fromkeys(variant for _, variant in gains):
        each = np.array([values for (_, other), values in gains.items() if other == variant])
        rows.append(_mean_row(f"{name}.{slug(variant)}.mean", each.mean(axis=0).tolist(), "ratio"))
        lowest = each[each.mean(axis=1).argmin()]
        rows.append(_mean_row(f"{name}.{slug(variant)}.lowest", lowest.tolist(), "ratio"))
        rows.append(_mean_row(f"{name}_single.{slug(variant)}.mean", single[variant], "ratio"))
    return rows


def _bound(experiment: Experiment, setting: ExperimentSetting) -> Capacity:
    scenario, rate = setting.scenario, setting.first_rate
    seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    each = [sustained_rate(scenario.instance_specs(), scenario.workload(rate, seed), rate) for seed in seeds]
    return Capacity(policy=BOUND, mean=float(np.mean(each)), ci95=half_width(each), per_seed=tuple(each), num_trials=0)


def _capacity_rows(found: Mapping[str, Capacity], setting: str, baseline: str) -> list[Row]:
    rows = []
    for name, one in found.items():
        key = f"{slug(name)}.{setting}"
        n = len(one.per_seed)
        has_interval = n > 1
        ci95 = one.ci95 if has_interval else None
        rows.append(Row(name=f"capacity_qps.{key}", value=one.mean, unit="requests/s", n=n, ci95=ci95))
        if baseline in found and name != baseline and any(found[baseline].per_seed):
            share, half = gain(one, found[baseline])
            ci95 = half if has_interval else None
            rows.append(Row(name=f"gain_over_{slug(baseline)}.{key}", value=share, unit="ratio", n=n, ci95=ci95))
    return rows


def run_point(point: Point) -> dict[str, Any]:
    """Simulate once; return the summary and the distributions."""
    work = point.scenario.workload(point.rate, point.seed)
    result = simulate(point.scenario.instance_specs(), work, point.policy, point.scenario.conditions, seed=point.seed)
    took = latencies(result)
    totals = summary(result, point.scenario.slo)
    totals["cdf"] = {"ttft_s": cdf(took.ttft_s), "e2e_s": cdf(took.e2e_s)}
    return totals


def forecast_point(point: Point) -> dict[str, Any]:
    """Simulate once with random placement; return the accuracy of the forecasts."""
    assert point.rate is not None
    return forecast_accuracy(point.scenario, point.rate, point.seed)


def hybrid_point(point: Point) -> dict[str, Any]:
    """Serve real-time and best-effort requests on one engine."""
    assert point.rate is not None
    return serve_hybrid(point.scenario, point.rate, point.seed)


def urgency_point(point: Point) -> dict[str, Any]:
    """Count urgent and normal requests of one engine."""
    assert point.rate is not None
    return count_urgent(point.scenario, point.rate, point.seed)


def _sweep(experiment: Experiment, runner: Runner, on_progress: OnProgress) -> Findings:
    cases: list[tuple[str, str, float]] = []
    points: list[Point] = []
    for setting in experiment.settings:
        for variant, scenario in experiment.cases(setting):
            for rate in setting.rates or (math.nan,):
                for seed in range(experiment.seeds):
                    points.append(
                        Point(
                            scenario=scenario,
                            policy=variant.policy,
                            rate=None if math.isnan(rate) else rate * (setting.saturated_rate or 1.0),
                            seed=seed,
                        )
                    )
                    cases.append((setting.name, variant.name, rate))
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    summaries: list[dict[str, Any] | None] = [None] * len(points)
    own = {FORECASTS: forecast_point, HYBRID: hybrid_point, URGENCY: urgency_point}
    run = own.get(experiment.kind, run_point)
    for done, (index, summarised) in enumerate(runner(run, points), 1):
        summaries[index] = summarised
        on_progress(done, len(points))
    for key, one in zip(cases, summaries, strict=True):
        assert one is not None
        found.setdefault(key, []).append(one)
    return _sweep_findings(experiment, found)


def _sweep_findings(
    experiment: Experiment, found: Mapping[tuple[str, str, float], Sequence[dict[str, Any]]]
) -> Findings:
    rows: list[Row] = []
    curves: Curves = {}
    for (setting, variant, rate), summaries in found.items():
        at = "" if math.isnan(rate) else f".{rate:g}"
        for metric, read in metrics_of(experiment.kind).items():
            values = [value for one in summaries if (value := read(one)) is not None]
            if not values:
                continue
            unit = metric.rpartition("_")[2] if metric.endswith("_s") else ""
            row = _mean_row(f"{metric}.{slug(variant)}.{setting}{at}", values, unit)
            rows.append(row)
            if metric in experiment.plots:
                x = 0.0 if math.isnan(rate) else rate
                point = (x, row.value, row.ci95 or 0.0)
                curves.setdefault(metric, {}).setdefault(setting, {}).setdefault(variant, []).append(point)
        if experiment.kind == URGENCY:
            curves.setdefault(URGENCY_OVER_TIME, {})[f"{setting}, {variant}, {rate:g}"] = summaries[0]["over_time"]

    def values_of(metric: str) -> Read:
        number = metrics_of(experiment.kind)[metric]

        def by_seed(setting: str, variant: str, rate: float) -> list[float]:
            values = [number(one) for one in found.get((setting, variant, rate), ())]
            return [value for value in values if value is not None]

        return by_seed

    settings = [setting.name for setting in experiment.settings]
    claims = [(claim, evaluate(claim, settings, values_of(claim.metric))) for claim in experiment.claims]
    rows += [row for claim, here in claims if claim.over for row in _difference_rows(claim, here, experiment.seeds)]
    if experiment.turn is not None:
        rows += _turning_rows(experiment, experiment.turn, values_of(experiment.turn.metric))
    best_rivals = _best_rivals(experiment, values_of(experiment.rival_metric)) if experiment.rivals else []
    rows += _mean_gain_rows(best_rivals)
    return Findings(rows=rows, curves=curves, claims=claims, best_rivals=best_rivals)


def _best_rivals(experiment: Experiment, read: Read) -> list[BestRival]:
    """Compare the variants that are no rivals with the best rival, at each setting and rate."""
    found = []
    for setting in experiment.settings:
        for rate in setting.rates:
            values = {variant.name: read(setting.name, variant.name, rate) for variant, _ in experiment.cases(setting)}
            means = {name: float(np.mean(values[name])) for name in experiment.rivals if values.get(name)}
            if not means:
                continue
            best = max(means, key=means.__getitem__)
            differences = {
                name: [one - other for one, other in zip(each, values[best], strict=True)]
                for name, each in values.items()
                if name not in experiment.rivals and each
            }
            found.append(
                BestRival(setting=setting.name, rate=rate, name=best, value=means[best], differences=differences)
            )
    return found


def _mean_gain_rows(best_rivals: Sequence[BestRival]) -> list[Row]:
    """Average the differences over settings and rates, for each seed."""
    names = dict.fromkeys(name for one in best_rivals for name in one.differences)
    rows = []
    for name in names:
        each = np.array([one.differences[name] for one in best_rivals if name in one.differences])
        rows.append(_mean_row(f"mean_gain_over_best_baseline.{slug(name)}", each.mean(axis=0).tolist(), "difference"))
    return rows


def _difference_rows(claim: Claim, here: Sequence[ClaimResult], seeds: int) -> list[Row]:
    what = f"{claim.metric}.{slug(claim.of)}_over_{slug(claim.over)}"
    return [
        Row(name=f"{what}.{one.setting}.{one.rate:g}", value=one.value, unit="ratio", n=seeds, ci95=one.half)
        for one in here
    ]


def _turning_rows(experiment: Experiment, turn: Turn, read: Read) -> list[Row]:
    """Return the turning point of each curve; a curve that stays below the limit for some seed has none."""
    rows = []
    for setting in experiment.settings:
        for variant, _ in experiment.cases(setting):
            each = turning_points(turn, setting.name, variant.name, setting.rates, read)
            if each and all(map(math.isfinite, each)):
                rows.append(_mean_row(f"turns_at_qps.{slug(variant.name)}.{setting.name}", each, "requests/s"))
    return rows


def slug(name: str) -> str:
    """Make a name that can be part of a dotted result name."""
    return name.replace("*", "_star").replace(": ", "_").replace(" = ", "").replace(", ", "_").replace(" ", "_")
