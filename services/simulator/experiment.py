"""Experiments as files declare them: a scenario, its settings, the policies compared, and what the paper has."""

from __future__ import annotations

import difflib
import math
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from predictor.config import require_count
from scheduler.policy import policy_from
from services.simulator import growth, growth_compared
from services.simulator.assembly import simulate
from services.simulator.bounds import sustained_rate
from services.simulator.capacity import Capacity, Objective, Search, capacities, gain, half_width
from services.simulator.claims import Claim, Read, Seen, Turn, claim_from, seen, turn_from, turning_points
from services.simulator.measures import cdf, latencies, summary
from services.simulator.ranks import ranked
from services.simulator.scenario import Scenario, as_table, scenario_from
from services.simulator.spreading import Runner

CAPACITY, SWEEP, FORECASTS, PROVISIONING = "capacity", "sweep", "forecasts", "provisioning"
KINDS = (CAPACITY, SWEEP, FORECASTS, PROVISIONING)
KEYS = (
    "title", "about", "kind", "seeds", "first_seed", "policies", "baseline", "rates", "first_rate", "resolution",
    "objective", "scenario", "settings", "variants", "rules", "paper", "paper_gains", "differences", "plots", "claims",
    "turn", "bound",
)  # fmt: skip

METRICS: Mapping[str, Callable[[dict[str, Any]], float | None]] = {
    "ttft_mean_s": lambda s: s["ttft_s"]["mean"],
    "ttft_p99_s": lambda s: s["ttft_s"]["p99"],
    "tpot_mean_s": lambda s: s["tpot_s"]["mean"],
    "tpot_p99_s": lambda s: s["tpot_s"]["p99"],
    "e2e_mean_s": lambda s: s["e2e_s"]["mean"],
    "e2e_p99_s": lambda s: s["e2e_s"]["p99"],
    "requests_per_s": lambda s: s["requests_per_s"],
    "preemptions": lambda s: s["num_preemptions"],
    "free_blocks_mean": lambda s: s["free_blocks"]["mean"] if "free_blocks" in s else None,
    "free_blocks_variance": lambda s: s["free_blocks"]["variance"] if "free_blocks" in s else None,
    "hit_ratio": lambda s: s["hit_ratio"],
    "prefill_imbalance": lambda s: s["prefill_imbalance"],
    "e2e_error_mean": lambda s: s["e2e_error"]["mean"] if "e2e_error" in s else None,
    "e2e_error_p50": lambda s: s["e2e_error"]["p50"] if "e2e_error" in s else None,
}

BOUND = "any placement, at most"

FORECAST_METRICS = {
    name: operator.itemgetter(name)
    for name in ("e2e_error_mean", "e2e_error_p50", "best_share", "first_three_share", "rank_mean")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A curve: a policy, and what is different for it."""

    name: str
    policy: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A cluster and traffic in which all variants are compared, at some rates or between those a search begins with."""

    name: str
    scenario: Scenario
    rates: tuple[float, ...] = ()
    first_rate: float = 10.0
    variants: tuple[str, ...] = ()
    baseline: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to measure."""

    name: str
    title: str
    about: str
    kind: str
    seeds: int
    baseline: str
    objective: Objective
    resolution: float
    settings: tuple[Setting, ...]
    variants: tuple[Variant, ...]
    paper: Mapping[str, Mapping[str, float]]
    differences: tuple[str, ...]
    plots: tuple[str, ...]
    first_seed: int = 0  # those before it are what settings were chosen on
    rules: tuple[str, ...] = growth.RULES
    paper_gains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # where it has no capacities
    claims: tuple[Claim, ...] = ()
    turn: Turn | None = None
    bound: bool = False  # tell also what no placement can sustain

    def baseline_of(self, setting: Setting) -> str:
        """What gains are over: the same everywhere, or the best of what is there already."""
        return setting.baseline or self.baseline

    def cases(self, setting: Setting) -> list[tuple[Variant, Scenario]]:
        """All variants of a setting, each with its scenario."""
        wanted = [one for one in self.variants if not setting.variants or one.name in setting.variants]
        return [(one, setting.scenario.changed(**one.changes)) for one in wanted]


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
class Findings:
    """What an experiment came to: numbers by name; and curves by plot, setting and variant, as (x, y, ci95)."""

    rows: list[Row]
    curves: Mapping[str, Mapping[str, Mapping[str, list[tuple[float, float, float]]]]]
    claims: Sequence[tuple[Claim, Sequence[Seen]]] = ()


def experiment_names() -> list[str]:
    """Name the experiments that come with the product."""
    folder = resources.files("services.simulator") / "experiments"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def experiment_named(name: str) -> Experiment:
    """Load an experiment that comes with the product, or one from a TOML file."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
        return experiment_from(Path(name).stem, text)
    if name not in experiment_names():
        near = difflib.get_close_matches(name, experiment_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"experiment: {name!r} is none of {', '.join(experiment_names())}{hint}")
    file = resources.files("services.simulator") / "experiments" / f"{name}.toml"
    return experiment_from(name, file.read_text(encoding="utf-8"))


def experiment_from(name: str, text: str) -> Experiment:
    """Read an experiment; what is unknown or makes no sense is refused by its name."""
    try:
        table = tomllib.loads(text)
        return _experiment(name, table)
    except (ValueError, TypeError) as error:  # TOML's errors are ValueErrors too
        raise ValueError(f"{name}: {error}") from None


def _experiment(name: str, table: Mapping[str, Any]) -> Experiment:
    for key in table:
        if key not in KEYS:
            raise ValueError(f"{key!r} is unknown; there are {', '.join(KEYS)}")
    kind = table.get("kind", SWEEP)
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    base = scenario_from(table.get("scenario", {}))
    variants = tuple(_variant(one) for one in [*table.get("policies", []), *table.get("variants", [])])
    if not variants:
        raise ValueError("policies: there is none")
    baseline = table.get("baseline", variants[0].name)
    if baseline not in [one.name for one in variants]:
        raise ValueError(f"baseline: {baseline!r} is none of the variants")
    settings = tuple(
        _setting(key, dict(changes), base, table) for key, changes in table.get("settings", {"all": {}}).items()
    )
    require_count("seeds", table.get("seeds", 5))
    require_count("first_seed", table.get("first_seed", 0), at_least=0)
    rules = tuple(table.get("rules", growth.RULES))
    growth.require_rules(rules)
    usual = tuple(FORECAST_METRICS) if kind == FORECASTS else ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
    plots = tuple(table.get("plots", usual))
    for plot in plots:
        if plot not in (known := _metrics(kind)):
            raise ValueError(f"plots: {plot!r} is none of {', '.join(known)}")
    turn = turn_from(table["turn"], tuple(_metrics(kind))) if "turn" in table else None
    names = [one.name for one in variants]
    return Experiment(
        name=name,
        title=table.get("title", name),
        about=table.get("about", ""),
        kind=kind,
        seeds=table.get("seeds", 5),
        baseline=baseline,
        objective=Objective(**table.get("objective", {})),
        resolution=table.get("resolution", 0.005),
        settings=settings,
        variants=variants,
        paper=table.get("paper", {}),
        paper_gains=table.get("paper_gains", {}),
        differences=tuple(table.get("differences", ())),
        plots=plots,
        first_seed=table.get("first_seed", 0),
        rules=rules,
        claims=tuple(claim_from(one, tuple(_metrics(kind)), names) for one in table.get("claims", ())),
        turn=turn,
        bound=bool(table.get("bound", False)),
    )


def _metrics(kind: str) -> Mapping[str, Callable[[dict[str, Any]], float | None]]:
    return FORECAST_METRICS if kind == FORECASTS else METRICS


def _variant(given: str | Mapping[str, Any]) -> Variant:
    table = {"policy": given} if isinstance(given, str) else dict(given)
    variant = Variant(
        name=str(table.get("name", table.get("policy", ""))),
        policy=str(table.get("policy", "")),
        changes={key: value for key, value in table.items() if key not in ("name", "policy")},
    )
    policy_from(variant.policy)  # a bad one is refused before anything is measured
    return variant


def _setting(name: str, changes: dict[str, Any], base: Scenario, table: Mapping[str, Any]) -> Setting:
    rates = changes.pop("rates", table.get("rates", []))
    first_rate = changes.pop("first_rate", table.get("first_rate", 10.0))
    variants = changes.pop("only", [])
    baseline = str(changes.pop("baseline", table.get("baseline", "")))
    return Setting(
        name=name,
        scenario=base.changed(**changes),
        rates=tuple(float(rate) for rate in rates),
        first_rate=float(first_rate),
        variants=tuple(variants),
        baseline=baseline,
    )


# Measuring.


def measure(experiment: Experiment, runner: Runner, told: Callable[[int, int], None]) -> Findings:
    """Measure everything; `told` hears how much is done, and of how much."""
    runner = _from_seed(experiment.first_seed, runner)
    if experiment.kind == PROVISIONING:
        return _provisioning(experiment, runner, told)
    return (_capacities if experiment.kind == CAPACITY else _sweep)(experiment, runner, told)


def _from_seed(first_seed: int, runner: Runner) -> Runner:
    """Count seeds from the first one on."""

    def later(measure: Callable[[Any], Any], tasks: Sequence[Any], /) -> Iterator[tuple[int, Any]]:
        yield from runner(measure, [replace(task, seed=task.seed + first_seed) for task in tasks])

    return later


def _provisioning(experiment: Experiment, runner: Runner, told: Callable[[int, int], None]) -> Findings:
    names = [setting.name for setting in experiment.settings]
    scenario = experiment.settings[0].scenario
    found = growth.measured(as_table(scenario), names, experiment.rules, experiment.seeds, runner=runner, told=told)
    rows: list[Row] = []
    curves: dict[str, dict[str, dict[str, list[tuple[float, float, float]]]]] = {}
    for (shape, rule), results in found.items():
        for number, unit in zip(growth.NUMBERS, growth.UNITS, strict=True):
            rows.append(_mean_row(f"{number}.{rule}.{shape}", [one[number] for one in results], unit))
            if shape == growth.FIGURE:
                rows.append(replace(rows[-1], name=f"{number}.{rule}"))
    until_s = {shape.name: shape.seconds for shape in growth.ALL_SHAPES}
    for (shape, rule), results in found.items():
        drawn = growth_compared.sizes([one["timeline"] for one in results], until_s[shape])
        curves.setdefault(growth.OVER_TIME, {}).setdefault(shape, {})[rule] = drawn
    return Findings(rows=rows + growth_rows(found), curves=curves)


def growth_rows(found: growth_compared.Found) -> list[Row]:
    """Compare rules: the paper's with each other, and headroom with both."""
    rows = [_mean_row(name, values, "ratio") for name, values in growth_compared.ratios(found).items()]
    for suffix, (dominated, run) in growth_compared.judged(found).items():
        num, unit = len(dominated), f"of {len(run)} shapes"
        rows.append(Row(name=f"headroom.dominates_shapes{suffix}", value=num, unit=unit, n=len(run)))
        for shape in run:
            num, of = growth_compared.seeds_dominated(found, shape)
            rows.append(Row(name=f"headroom.dominates_seeds.{shape}", value=num, unit=f"of {of} seeds", n=of))
    return rows


def _mean_row(name: str, values: Sequence[float], unit: str) -> Row:
    half = half_width(values) if len({*values}) > 1 else None  # runs that do not differ tell nothing of others
    return Row(name=name, value=float(np.mean(values)), unit=unit, n=len(values), ci95=half)


def _capacities(experiment: Experiment, runner: Runner, told: Callable[[int, int], None]) -> Findings:
    rows: list[Row] = []
    bars: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    num_cases = sum(len(experiment.cases(setting)) for setting in experiment.settings)
    about = num_cases * experiment.seeds * 10  # trials of a bisection
    num_trials = 0

    def heard(*_: object) -> None:
        nonlocal num_trials
        num_trials += 1
        told(min(num_trials, about - 1), about)

    for setting in experiment.settings:
        cases = experiment.cases(setting)
        search = Search(
            resolution=experiment.resolution,
            seeds=experiment.seeds,
            most_seeds=experiment.seeds,
            first_rate=setting.first_rate,
            paired=True,
        )
        found = capacities(
            [(scenario, variant.policy) for variant, scenario in cases], experiment.objective, search, runner, heard
        )
        by_name = {variant.name: one for (variant, _), one in zip(cases, found, strict=True)}
        if experiment.bound:
            by_name[BOUND] = _bound(setting.scenario, experiment.seeds, setting.first_rate)
        rows += _capacity_rows(by_name, setting.name, experiment.baseline_of(setting))
        known = experiment.seeds > 1
        bars[setting.name] = {name: [(0.0, one.mean, one.ci95 if known else 0.0)] for name, one in by_name.items()}
    told(about, about)
    return Findings(rows=rows, curves={"capacity": bars})


def _bound(scenario: Scenario, seeds: int, rate: float) -> Capacity:
    units = scenario.units()
    each = [sustained_rate(units, scenario.workload(rate, seed), rate) for seed in range(seeds)]
    return Capacity(policy=BOUND, mean=float(np.mean(each)), ci95=half_width(each), per_seed=tuple(each), num_trials=0)


def _capacity_rows(found: Mapping[str, Capacity], setting: str, baseline: str) -> list[Row]:
    rows = []
    for name, one in found.items():
        key = f"{slug(name)}.{setting}"
        n = len(one.per_seed)
        known = n > 1  # of one seed, how far others are off is not
        rows.append(
            Row(name=f"capacity_qps.{key}", value=one.mean, unit="requests/s", n=n, ci95=one.ci95 if known else None)
        )
        if baseline in found and name != baseline:
            share, half = gain(one, found[baseline])
            rows.append(
                Row(name=f"gain_over_{slug(baseline)}.{key}", value=share, unit="ratio", n=n,
                    ci95=half if known else None)
            )  # fmt: skip
    return rows


def run_point(point: Point) -> dict[str, Any]:
    """Run once; give the summary and the distributions."""
    work = point.scenario.workload(point.rate, point.seed)
    result = simulate(point.scenario.units(), work, point.policy, point.scenario.conditions, seed=point.seed)
    took = latencies(result)
    summed = summary(result, point.scenario.slo)
    summed["cdf"] = {"ttft_s": cdf(took.ttft_s), "e2e_s": cdf(took.e2e_s)}
    return summed


def rank_point(point: Point) -> dict[str, Any]:
    """Run once with random placement, and look at the forecasts."""
    assert point.rate is not None
    return ranked(point.scenario, point.rate, point.seed)


def _sweep(experiment: Experiment, runner: Runner, told: Callable[[int, int], None]) -> Findings:
    places: list[tuple[str, str, float]] = []
    points: list[Point] = []
    for setting in experiment.settings:
        for variant, scenario in experiment.cases(setting):
            for rate in setting.rates or (math.nan,):
                for seed in range(experiment.seeds):
                    points.append(
                        Point(
                            scenario=scenario,
                            policy=variant.policy,
                            rate=None if math.isnan(rate) else rate,
                            seed=seed,
                        )
                    )
                    places.append((setting.name, variant.name, rate))
    found: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    by_place: list[dict[str, Any] | None] = [None] * len(points)
    run = rank_point if experiment.kind == FORECASTS else run_point
    for done, (place, summed) in enumerate(runner(run, points), 1):
        by_place[place] = summed
        told(done, len(points))
    for key, one in zip(places, by_place, strict=True):
        assert one is not None
        found.setdefault(key, []).append(one)
    return _sweep_findings(experiment, found)


def _sweep_findings(
    experiment: Experiment, found: Mapping[tuple[str, str, float], Sequence[dict[str, Any]]]
) -> Findings:
    rows: list[Row] = []
    curves: dict[str, dict[str, dict[str, list[tuple[float, float, float]]]]] = {}
    for (setting, variant, rate), summaries in found.items():
        at = "" if math.isnan(rate) else f".{rate:g}"
        for metric, read in _metrics(experiment.kind).items():
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

    def each_seed(metric: str) -> Read:
        number = _metrics(experiment.kind)[metric]

        def by_seed(setting: str, variant: str, rate: float) -> list[float]:
            values = [number(one) for one in found.get((setting, variant, rate), ())]
            return [value for value in values if value is not None]

        return by_seed

    settings = [setting.name for setting in experiment.settings]
    claims = [(claim, seen(claim, settings, each_seed(claim.metric))) for claim in experiment.claims]
    rows += [row for claim, here in claims if claim.over for row in _difference_rows(claim, here, experiment.seeds)]
    if experiment.turn is not None:
        rows += _turning_rows(experiment, experiment.turn, each_seed(experiment.turn.metric))
    return Findings(rows=rows, curves=curves, claims=claims)


def _difference_rows(claim: Claim, here: Sequence[Seen], seeds: int) -> list[Row]:
    what = f"{claim.metric}.{slug(claim.of)}_over_{slug(claim.over)}"
    return [
        Row(name=f"{what}.{one.setting}.{one.rate:g}", value=one.value, unit="ratio", n=seeds, ci95=one.half)
        for one in here
    ]


def _turning_rows(experiment: Experiment, turn: Turn, read: Read) -> list[Row]:
    """Tell from which rate on curves are above the limit; a curve of which some seed never is has no such row."""
    rows = []
    for setting in experiment.settings:
        for variant, _ in experiment.cases(setting):
            each = turning_points(turn, setting.name, variant.name, setting.rates, read)
            if each and all(map(math.isfinite, each)):
                rows.append(_mean_row(f"turns_at_qps.{slug(variant.name)}.{setting.name}", each, "requests/s"))
    return rows


def slug(name: str) -> str:
    """Make a name that goes between dots."""
    return name.replace("*", "_star").replace(": ", "_").replace(" = ", "").replace(", ", "_").replace(" ", "_")
