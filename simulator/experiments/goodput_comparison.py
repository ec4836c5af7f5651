"""Compares the goodput of variants: how many instances only prefill is chosen for each, on other traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.capacity import half_width
from simulator.goodput import Goodput, GoodputCase, goodputs
from simulator.parallel import Runner
from simulator.scenario import Scenario

if TYPE_CHECKING:
    from simulator.experiments.experiment import Experiment, ExperimentSetting, Variant

TUNING_SEED = 1000  # splits are chosen on other samples of traffic than those that are reported
TUNING_RESOLUTION = 0.06
LEAST_RATE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantGoodput:
    """A variant's number of instances that only prefill, and its goodput by seed."""

    num_prefill: int
    by_seed: Sequence[Goodput]

    @property
    def rates(self) -> list[float]:
        """The goodput of each seed."""
        return [one.rate for one in self.by_seed]

    def mean_of(self, name: str) -> float | None:
        """Average what the runs at the goodput have shown."""
        values = [value for one in self.by_seed if (value := one.at.get(name)) is not None]
        return float(np.mean(values)) if values else None


Found = Mapping[str, Mapping[str, VariantGoodput]]  # by setting and variant


def compare(experiment: Experiment, runner: Runner, on_progress: Callable[[int, int], None]) -> Found:
    """Find the goodput of all variants in all settings."""
    num_done, estimate = 0, _estimated_trials(experiment)

    def on_trial() -> None:
        nonlocal num_done
        num_done += 1
        on_progress(min(num_done, estimate - 1), estimate)

    found = {setting.name: _in_setting(experiment, setting, runner, on_trial) for setting in experiment.settings}
    on_progress(estimate, estimate)
    return found


def _in_setting(
    experiment: Experiment, setting: ExperimentSetting, runner: Runner, on_trial: Callable[[], None]
) -> dict[str, VariantGoodput]:
    cases = experiment.cases(setting)
    splits, near = _chosen_splits(experiment, setting, cases, runner, on_trial)
    scenarios = {variant.name: split_into(scenario, splits[variant.name]) for variant, scenario in cases}

    def measure(seeds: Sequence[int], first_rates: Mapping[str, float]) -> dict[str, list[Goodput]]:
        asked = [
            GoodputCase(
                scenario=scenarios[variant.name],
                policy=variant.policy,
                seed=seed,
                first_rate=first_rates.get(variant.name, setting.first_rate),
            )
            for variant, _ in cases
            for seed in seeds
        ]
        answers = goodputs(asked, experiment.attained, experiment.resolution, runner, on_trial)
        width = len(seeds)
        return {variant.name: answers[place * width : (place + 1) * width] for place, (variant, _) in enumerate(cases)}

    first = measure([0], near)
    rest = measure(range(1, experiment.seeds), {name: one[0].rate for name, one in first.items() if one[0].rate > 0})
    return {
        variant.name: VariantGoodput(
            num_prefill=splits[variant.name], by_seed=[*first[variant.name], *rest[variant.name]]
        )
        for variant, _ in cases
    }


def _chosen_splits(
    experiment: Experiment,
    setting: ExperimentSetting,
    cases: Sequence[tuple[Variant, Scenario]],
    runner: Runner,
    on_trial: Callable[[], None],
) -> tuple[dict[str, int], dict[str, float]]:
    """Choose for each variant with several splits the one with the largest goodput on the tuning traffic.

    Return also that goodput, where there is one.
    """
    keys: list[tuple[str, int]] = []
    asked: list[GoodputCase] = []
    shorter = {"traffic": {"num_requests": experiment.tuning_requests}} if experiment.tuning_requests else {}
    for variant, whole in cases:
        scenario = whole.changed(**shorter)
        for num_prefill in splits_of(variant, scenario):
            keys.append((variant.name, num_prefill))
            asked.append(
                GoodputCase(
                    scenario=split_into(scenario, num_prefill),
                    policy=variant.policy,
                    seed=TUNING_SEED,
                    first_rate=setting.first_rate,
                )
            )
    answers = goodputs(asked, experiment.attained, TUNING_RESOLUTION, runner, on_trial)
    rates: dict[str, dict[int, float]] = {}
    for (name, num_prefill), answer in zip(keys, answers, strict=True):
        rates.setdefault(name, {})[num_prefill] = answer.rate
    best = {name: max(of, key=of.__getitem__) for name, of in rates.items()}
    source = {variant.name: variant.split_of or variant.name for variant, _ in cases}
    splits = {name: best.get(other, 0) for name, other in source.items()}
    return splits, {
        name: rates[other][best[other]]
        for name, other in source.items()
        if other in best and rates[other][best[other]] > 0
    }


def splits_of(variant: Variant, scenario: Scenario) -> list[int]:
    """Return the numbers of prefill instances that a variant tries."""
    count = scenario.instances[0].count
    return sorted({min(count - 1, max(1, round(share * count))) for share in variant.splits})


def split_into(scenario: Scenario, num_prefill: int) -> Scenario:
    """Return the scenario with so many instances that only prefill."""
    return scenario.changed(instances={"num_prefill": num_prefill}) if num_prefill else scenario


def best_rival(experiment: Experiment, found: Mapping[str, VariantGoodput]) -> str:
    """Return the rival with the largest mean goodput."""
    return max((name for name in experiment.rivals if name in found), key=lambda name: np.mean(found[name].rates))


def gains_over_best(experiment: Experiment, found: Found) -> dict[tuple[str, str], list[float]]:
    """Return by setting and variant how far it is above the best rival, as a share, seed by seed.

    Settings are left out in which the best rival's goodput is 0 for some seed.
    """
    gains: dict[tuple[str, str], list[float]] = {}
    for setting, variants in found.items():
        best = variants[best_rival(experiment, variants)]
        if min(best.rates) <= 0:
            continue
        for name, one in variants.items():
            if name not in experiment.rivals:
                gains[setting, name] = [rate / other - 1 for rate, other in zip(one.rates, best.rates, strict=True)]
    return gains


def gains_over_best_single(experiment: Experiment, found: Found) -> dict[str, list[float]]:
    """Return by variant how far it is above the one rival that is best over all settings, averaged, seed by seed."""
    names = [name for name in experiment.rivals if all(name in variants for variants in found.values())]
    gains: dict[str, dict[str, list[float]]] = {}
    for variants in found.values():
        for name, one in variants.items():
            for rival in names if name not in experiment.rivals else ():
                pairs = zip(one.rates, variants[rival].rates, strict=True)
                ratios = [rate / max(other, LEAST_RATE) - 1 for rate, other in pairs]
                gains.setdefault(name, {}).setdefault(rival, []).append(float(np.mean(ratios)))
    return {name: min(of.values(), key=np.mean) for name, of in gains.items() if of}


def goodput_tables(experiment: Experiment, found: Found) -> list[str]:
    """Return a table for each setting as Markdown."""
    tables = []
    gains = gains_over_best(experiment, found) if experiment.rivals else {}
    for setting, variants in found.items():
        head = ["requests/s", "prefill instances", "two legs", "attained by tokens", "over the best rival"]
        lines = [f"| {setting} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for name, one in variants.items():
            gain = gains.get((setting, name))
            cells = [
                _spread(one.rates),
                str(one.num_prefill),
                _percent(one.mean_of("disaggregated")),
                _percent(one.mean_of("attained_tokens")),
                "" if gain is None else f"{np.mean(gain):+.1%}",
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return tables


def _spread(rates: Sequence[float]) -> str:
    half = f" ± {half_width(rates):.1f}" if len(rates) > 1 else ""
    return f"{np.mean(rates):.1f}{half}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _estimated_trials(experiment: Experiment) -> int:
    """Estimate the number of trials, for a progress bar."""
    total = 0
    for setting in experiment.settings:
        for variant, scenario in experiment.cases(setting):
            total += 6 * len(splits_of(variant, scenario)) + 7 * experiment.seeds
    return max(1, total)


def numbers_of(found: Found) -> dict[tuple[str, str, str], list[float]]:
    """Return the numbers of all seeds, by metric, variant and setting."""
    numbers: dict[tuple[str, str, str], list[float]] = {}
    for setting, variants in found.items():
        for name, one in variants.items():
            numbers["goodput_qps", name, setting] = one.rates
            numbers["num_prefill", name, setting] = [float(one.num_prefill)]
            for metric in ("attained_tokens", "missed_prompt_ratio", "disaggregated"):
                values = [one.at[metric] for one in one.by_seed if one.at.get(metric) is not None]
                if values:
                    numbers[metric, name, setting] = values
    return numbers
