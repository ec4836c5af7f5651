"""Experiments as TOML files declare them: a scenario, its settings, the compared policies, and the paper's results."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from predictor.config import require_count
from predictor.suggestions import did_you_mean, require_choice, unknown_choice
from scheduler.policy import policy_from
from scheduler.provisioning.tiers import Tiers, tiers_from
from simulator.capacity import LatencyObjective
from simulator.experiments import autoscaling_shapes, cost_comparison
from simulator.experiments.claims import Claim, Turn, claim_from, turn_from
from simulator.scenario import Scenario, scenario_from

CAPACITY, SWEEP, FORECASTS, PROVISIONING, HYBRID, URGENCY, GOODPUT, COST = KINDS = (
    "capacity", "sweep", "forecasts", "provisioning", "hybrid", "urgency", "goodput", "cost",
)  # fmt: skip
KEYS = (
    "title", "about", "kind", "seeds", "first_seed", "policies", "baseline", "rates", "first_rate", "resolution",
    "objective", "scenario", "settings", "variants", "rules", "paper", "paper_gains", "differences", "plots", "claims",
    "turn", "bound", "rivals", "rival_metric", "saturated_rate",
    "attained", "work", "gain_name", "tuning_requests", "warm_up_s", "axes", "axis_separator", "default_settings",
)  # fmt: skip

OF_VARIANTS = ("name", "policy", "splits", "split_of", "tiers")  # what else a variant has changes the scenario
SEPARATORS = ("_", ".")  # of the names of a setting and of its values on axes
LATENCY_PLOTS = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")


def _of_priority(summary: dict[str, Any], priority: int, metric: str) -> float | None:
    """Read a metric of the requests with a priority; None where no such request has a target."""
    part: dict[str, float] = summary.get("by_priority", {}).get(str(priority), {})
    return part.get(metric)


def _of_quarter(summary: dict[str, Any], place: int) -> float | None:
    """Read the SLO attainment of a quarter of the requests with targets, by the length of their prompts."""
    quarters: list[dict[str, float]] = summary.get("by_prompt_quarter", [])
    return quarters[place]["slo_attained"] if quarters else None


# The metrics that reports and charts can show, as functions of a summary.
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
    "tdg_ratio": lambda s: s.get("tdg_ratio"),
    "slo_attained": lambda s: s.get("slo_attained"),
    "deadline_attained": lambda s: s.get("deadline_attained"),
    "worst_ttft_over_target": lambda s: s.get("worst_ttft_over_target"),
    **{
        f"{name}_priority_{priority}": functools.partial(_of_priority, priority=priority, metric=name)
        for name in ("tdg_ratio", "slo_attained", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
        for priority in (0, 1)
    },
    "slo_attained_shortest_quarter": lambda s: _of_quarter(s, 0),
    "slo_attained_longest_quarter": lambda s: _of_quarter(s, -1),
}


FORECAST_METRICS = {
    name: operator.itemgetter(name)
    for name in ("e2e_error_mean", "e2e_error_p50", "best_share", "first_three_share", "rank_mean")
}

# Of one engine that serves real-time and best-effort requests.
HYBRID_METRICS = {
    name: operator.itemgetter(name)
    for name in (
        "rt_normalized_latency_s", "be_throughput", "rt_ttft_attained", "rt_tpot_attained", "rt_ttft_mean_s",
        "rt_ttft_p99_s", "rt_tpot_mean_s", "rt_throughput", "preemptions",
    )
}  # fmt: skip
# Of one engine whose rule distinguishes urgent requests from the others.
URGENCY_METRICS = {name: operator.itemgetter(name) for name in ("num_urgent", "num_normal", "urgent_share")}
OWN_METRICS = {FORECASTS: FORECAST_METRICS, HYBRID: HYBRID_METRICS, URGENCY: URGENCY_METRICS}
HYBRID_PLOTS = ("rt_normalized_latency_s", "be_throughput", "rt_ttft_attained", "rt_tpot_attained")
OWN_PLOTS = {FORECASTS: tuple(FORECAST_METRICS), HYBRID: HYBRID_PLOTS, URGENCY: tuple(URGENCY_METRICS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with its changes to the scenario, or these alone; one curve or row of a report.

    `splits` are the shares of the instances that may have the role prefill, of which an experiment of kind goodput
    chooses the best; `split_of` names the variant whose choice is taken over. In an experiment of kind cost, instances
    move between `tiers`.
    """

    name: str
    policy: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    splits: tuple[float, ...] = ()
    split_of: str = ""
    tiers: Tiers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentSetting:
    """A scenario in which all variants are compared, at some rates, or by a search that starts at `first_rate`.

    With a `saturated_rate` in requests/s, the rates are loads: multiples of it. One that is `optional` is measured only
    where it is asked for. In `warm_up_s` before and after the requests that count for a goodput, more arrive.
    """

    name: str
    scenario: Scenario
    rates: tuple[float, ...] = ()
    first_rate: float = 10.0
    saturated_rate: float | None = None
    warm_up_s: float = 0.0
    variants: tuple[str, ...] = ()
    baseline: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to measure, and the paper's results."""

    name: str
    title: str
    about: str
    kind: str
    seeds: int
    baseline: str
    objective: LatencyObjective
    resolution: float
    settings: tuple[ExperimentSetting, ...]
    variants: tuple[Variant, ...]
    paper: Mapping[str, Mapping[str, float]]
    differences: tuple[str, ...]
    plots: tuple[str, ...]
    first_seed: int = 0  # earlier seeds were used to choose the settings
    rules: tuple[str, ...] = autoscaling_shapes.RULES
    paper_gains: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # where the paper has gains but no capacities
    claims: tuple[Claim, ...] = ()
    turn: Turn | None = None
    bound: bool = False  # report also the upper bound for any placement
    rivals: tuple[str, ...] = ()  # the variants whose best the others are compared with, at each setting and rate
    rival_metric: str = "tdg_ratio"  # by which the best is chosen; more is better
    attained: float = 0.9  # the share of the requests that goodput requires
    work: bool = False  # report also the goodput by work: by the share of the tokens
    gain_name: str = "goodput_over_best_fixed"  # of results: how far a variant's goodput is above the best rival's
    tuning_requests: int = 0  # in the runs that choose splits; 0: as in the others

    def baseline_of(self, setting: ExperimentSetting) -> str:
        """Return the variant that gains are relative to."""
        return setting.baseline or self.baseline

    def with_variants(self, patterns: Sequence[str]) -> Experiment:
        """Return the experiment with the variants that match a pattern, and with its claims only if these are all."""
        names = matching([one.name for one in self.variants], patterns)
        variants = tuple(one for one in self.variants if one.name in names)
        for one in variants:
            if one.split_of and one.split_of not in names:
                raise ValueError(f"{one.name!r} takes over the split of {one.split_of!r}: choose that, too")
        settings = []
        for setting in self.settings:
            chosen = [name for name in names if not setting.variants or name in setting.variants]
            if chosen:
                baseline = self.baseline_of(setting)
                settings.append(replace(setting, baseline=baseline if baseline in chosen else chosen[0]))
        if not settings:
            raise ValueError(f"{', '.join(names)}: in none of the chosen settings")
        return replace(
            self,
            variants=variants,
            settings=tuple(settings),
            baseline=self.baseline if self.baseline in names else names[0],
            rivals=tuple(name for name in self.rivals if name in names),
            claims=() if len(names) < len(self.variants) else self.claims,
        )

    def cases(self, setting: ExperimentSetting) -> list[tuple[Variant, Scenario]]:
        """Return the variants of a setting, each with its scenario."""
        variants = [one for one in self.variants if not setting.variants or one.name in setting.variants]
        return [(one, setting.scenario.changed(**one.changes)) for one in variants]


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, each once; a pattern without any is rejected."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"must be one of {', '.join(names)}, not {pattern!r}{did_you_mean(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def experiment_names() -> list[str]:
    """Return the names of the shipped experiments."""
    folder = resources.files("simulator") / "experiments"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def experiment_named(name: str) -> Experiment:
    """Load a shipped experiment, or one from a TOML file."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
        return experiment_from(Path(name).stem, text)
    if name not in experiment_names():
        raise unknown_choice("experiment", name, experiment_names())
    file = resources.files("simulator") / "experiments" / f"{name}.toml"
    return experiment_from(name, file.read_text(encoding="utf-8"))


def experiment_from(name: str, text: str) -> Experiment:
    """Read an experiment from TOML; unknown keys and invalid values are rejected by name."""
    try:
        table = tomllib.loads(text)
        return _experiment(name, table)
    except (ValueError, TypeError, RecursionError) as error:  # TOML errors are ValueErrors, too
        raise ValueError(f"{name}: {error}") from None


def _experiment(name: str, table: Mapping[str, Any]) -> Experiment:
    for key in table:
        if key not in KEYS:
            raise ValueError(f"{key!r} is unknown; there are {', '.join(KEYS)}")
    kind = table.get("kind", SWEEP)
    require_choice("kind", kind, KINDS)
    base = scenario_from(table.get("scenario", {}))
    variants = tuple(_variant(one, kind) for one in [*table.get("policies", []), *table.get("variants", [])])
    if not variants:
        raise ValueError("policies: name at least one")
    baseline = table.get("baseline", variants[0].name)
    if baseline not in [one.name for one in variants]:
        raise ValueError(f"baseline: must be one of the variants, not {baseline!r}")
    settings = _settings(base, table)
    _require_rates(kind, settings)
    if kind == COST:
        cost_comparison.require_comparable(table, settings, variants)
    require_count("seeds", table.get("seeds", 5))
    require_count("first_seed", table.get("first_seed", 0), at_least=0)
    require_count("tuning_requests", table.get("tuning_requests", 0), at_least=0)
    rules = tuple(table.get("rules", autoscaling_shapes.RULES))
    autoscaling_shapes.require_rules(rules)
    plots = tuple(table.get("plots", OWN_PLOTS.get(kind, LATENCY_PLOTS)))
    for plot in plots:
        require_choice("plots", plot, metrics_of(kind))
    turn = turn_from(table["turn"], tuple(metrics_of(kind))) if "turn" in table else None
    names = [one.name for one in variants]
    rivals, rival_metric = tuple(table.get("rivals", ())), table.get("rival_metric", "tdg_ratio")
    for rival in rivals:
        if rival not in names:
            raise ValueError(f"rivals: must be one of the variants, not {rival!r}")
    _require_splits(variants)
    if rivals:
        require_choice("rival_metric", rival_metric, metrics_of(kind))
    return Experiment(
        name=name,
        title=table.get("title", name),
        about=table.get("about", ""),
        kind=kind,
        seeds=table.get("seeds", 5),
        baseline=baseline,
        objective=LatencyObjective(**table.get("objective", {})),
        resolution=table.get("resolution", 0.005),
        settings=settings,
        variants=variants,
        paper=table.get("paper", {}),
        paper_gains=table.get("paper_gains", {}),
        differences=tuple(table.get("differences", ())),
        plots=plots,
        first_seed=table.get("first_seed", 0),
        rules=rules,
        claims=tuple(claim_from(one, tuple(metrics_of(kind)), names) for one in table.get("claims", ())),
        turn=turn,
        bound=bool(table.get("bound", False)),
        rivals=rivals,
        rival_metric=rival_metric,
        attained=_share(table.get("attained", 0.9)),
        work=_flag("work", table.get("work", False)),
        gain_name=str(table.get("gain_name", "goodput_over_best_fixed")),
        tuning_requests=table.get("tuning_requests", 0),
    )


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {value!r}")
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"attained: must be a share above 0, at most 1, not {value!r}")
    return float(value)


def _require_splits(variants: Sequence[Variant]) -> None:
    split = [one.name for one in variants if one.splits]
    for one in variants:
        if one.split_of and one.split_of not in split:
            raise ValueError(f"policies.split_of: {one.split_of!r} is no variant with splits")


def _require_rates(kind: str, settings: Sequence[ExperimentSetting]) -> None:
    if kind in (HYBRID, URGENCY, FORECASTS, COST) and not all(one.rates for one in settings):
        raise ValueError(f"rates: an experiment of kind {kind} needs at least one for each setting")
    if len({one.saturated_rate is None for one in settings}) > 1:
        raise ValueError("saturated_rate: must be given for all settings, or for none")


def metrics_of(kind: str) -> Mapping[str, Callable[[dict[str, Any]], float | None]]:
    """Return the metrics of a kind of experiment, by name, with the functions that read them from a summary."""
    return OWN_METRICS.get(kind, METRICS)


def _variant(given: str | Mapping[str, Any], kind: str) -> Variant:
    table: dict[str, Any] = {"policy": given} if isinstance(given, str) else dict(given)
    variant = Variant(
        name=str(table.get("name", table.get("policy", ""))),
        policy=str(table.get("policy", "")),
        changes={key: value for key, value in table.items() if key not in OF_VARIANTS},
        splits=tuple(table.get("splits", ())),
        split_of=str(table.get("split_of", "")),
        tiers=_tiers(table["tiers"], kind) if "tiers" in table else (),
    )
    if not all(isinstance(share, int | float) and 0 < share < 1 for share in variant.splits):
        raise ValueError(f"policies.splits: must be shares between 0 and 1, not {variant.splits}")
    if kind not in (HYBRID, URGENCY):  # which have one instance
        policy_from(variant.policy)  # reject a bad policy before anything is measured
    return variant


def _tiers(given: Any, kind: str) -> Tiers:
    if kind != COST:
        raise ValueError(f"policies.tiers: experiments of kind {kind} have none")
    try:
        return tiers_from(given)
    except ValueError as error:
        raise ValueError(f"policies.tiers: {error}") from None


def _settings(base: Scenario, table: Mapping[str, Any]) -> tuple[ExperimentSetting, ...]:
    """Make the settings: those of the table, each with every combination of one value of each axis.

    `axis_separator` stands between their names. Where `default_settings` names some, the others are optional.
    """
    default = table.get("default_settings", ())
    separator = table.get("axis_separator", "_")
    if separator not in SEPARATORS:
        raise ValueError(f"axis_separator: must be one of {' '.join(SEPARATORS)}, not {separator!r}")
    found = []
    for key, changes in table.get("settings", {"all": {}}).items():
        setting = _setting(key, dict(changes), base, table)
        for values in itertools.product(*(axis.items() for axis in table.get("axes", ()))):
            scenario = setting.scenario
            for _, more in values:
                scenario = scenario.changed(**more)
            name = separator.join([key, *(value for value, _ in values)])
            optional = setting.optional or (bool(default) and name not in default)
            found.append(replace(setting, name=name, scenario=scenario, optional=optional))
    if unknown := set(default) - {one.name for one in found}:
        raise ValueError(f"default_settings: {', '.join(sorted(unknown))}: no such setting")
    return tuple(found)


def _setting(name: str, changes: dict[str, Any], base: Scenario, table: Mapping[str, Any]) -> ExperimentSetting:
    rates = changes.pop("rates", table.get("rates", []))
    first_rate = changes.pop("first_rate", table.get("first_rate", 10.0))
    saturated_rate = changes.pop("saturated_rate", table.get("saturated_rate"))
    if saturated_rate is not None and not (isinstance(saturated_rate, int | float) and 0 < saturated_rate < math.inf):
        raise ValueError(f"saturated_rate: must be a number above 0, not {saturated_rate!r}")
    warm_up_s = changes.pop("warm_up_s", table.get("warm_up_s", 0.0))
    if isinstance(warm_up_s, bool) or not isinstance(warm_up_s, int | float) or not 0 <= warm_up_s < math.inf:
        raise ValueError(f"warm_up_s: must be a time from 0 on, not {warm_up_s!r}")
    variants = changes.pop("only", [])
    optional = bool(changes.pop("optional", False))
    baseline = str(changes.pop("baseline", table.get("baseline", "")))
    return ExperimentSetting(
        name=name,
        scenario=base.changed(**changes),
        rates=tuple(float(rate) for rate in rates),
        first_rate=float(first_rate),
        saturated_rate=saturated_rate,
        warm_up_s=float(warm_up_s),
        variants=tuple(variants),
        baseline=baseline,
        optional=optional,
    )
