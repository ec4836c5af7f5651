"""Experiments as TOML files declare them: those that are shipped, and the user's own."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from predictor.config import require_count
from predictor.suggestions import require_choice, unknown_choice
from scheduler.policy import policy_from
from scheduler.provisioning.tiers import Tiers, tiers_from
from simulator.capacity import LatencyObjective
from simulator.experiments import autoscaling_shapes, cost_comparison
from simulator.experiments.claims import claim_from, turn_from
from simulator.experiments.experiment import Experiment, ExperimentSetting, Variant
from simulator.experiments.experiment_metrics import (
    COST,
    FORECASTS,
    HYBRID,
    KINDS,
    LATENCY_PLOTS,
    OWN_PLOTS,
    SWEEP,
    URGENCY,
    metrics_of,
)  # fmt: skip
from simulator.scenario import Scenario, scenario_from

KEYS = (
    "title", "about", "kind", "seeds", "first_seed", "policies", "baseline", "rates", "first_rate", "resolution",
    "objective", "scenario", "scenario_of", "settings", "variants", "rules", "paper", "paper_gains", "differences",
    "plots", "claims", "turn", "bound", "rivals", "rival_metric", "saturated_rate",
    "attained", "work", "gain_name", "tuning_requests", "warm_up_s", "axes", "axis_separator", "default_settings",
)  # fmt: skip

OF_VARIANTS = ("name", "policy", "splits", "split_of", "tiers")  # what else a variant has changes the scenario
SEPARATORS = ("_", ".")  # of the names of a setting and of its values on axes


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
    return experiment_from(name, _shipped_text(name))


def _shipped_text(name: str) -> str:
    return (resources.files("simulator") / "experiments" / f"{name}.toml").read_text(encoding="utf-8")


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
    base = _base_scenario(table)
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


def _base_scenario(table: Mapping[str, Any]) -> Scenario:
    """Return the scenario of an experiment: its own, or that of the shipped experiment `scenario_of` with changes."""
    other = table.get("scenario_of", "")
    if not other:
        return scenario_from(table.get("scenario", {}))
    require_choice("scenario_of", other, experiment_names())
    return _base_scenario(tomllib.loads(_shipped_text(other))).changed(**table.get("scenario", {}))


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
