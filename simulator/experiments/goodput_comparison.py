"""Compares the goodput of variants: how many instances only prefill is chosen for each, on other traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from simulator.capacity import half_width
from simulator.goodput import Goodput, GoodputCase, GoodputGoal, GoodputTrial, goodputs
from simulator.parallel import Runner
from simulator.request_needs import kinds_of
from simulator.scenario import Scenario
from simulator.slo_bound import KINDS, TIERS, TITLES, SloBound, slo_bound

if TYPE_CHECKING:
    from simulator.experiments.experiment import Experiment, ExperimentSetting, Variant

TUNING_SEED = 1000  # splits are chosen on other samples of traffic than those that are reported
TUNING_RESOLUTION = 0.06
LEAST_RATE = 1e-9
BOUND = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantGoodput:
    """A variant's number of instances that only prefill, and its goodput by seed, also by work if asked for."""

    num_prefill: int
    by_seed: Sequence[Goodput]
    by_work: Sequence[Goodput] = ()

    @property
    def rates(self) -> list[float]:
        """The goodput of each seed."""
        return [one.rate for one in self.by_seed]

    @property
    def counted_by_work(self) -> VariantGoodput:
        """The same variant, with its goodput by work in the place of that by requests."""
        return replace(self, by_seed=self.by_work)

    def mean_of(self, name: str) -> float | None:
        """Average what the runs at the goodput have shown."""
        values = [value for one in self.by_seed if (value := one.at.get(name)) is not None]
        return float(np.mean(values)) if values else None


Found = Mapping[str, Mapping[str, VariantGoodput]]  # by setting and variant
Bounds = Mapping[str, Sequence[SloBound]]  # by setting, one for each seed


def trial_of(
    experiment: Experiment, setting: ExperimentSetting, case: tuple[Variant, Scenario], rate: float, seed: int
) -> GoodputTrial:
    """Return one run of a variant at a rate, outside of a search for the goodput."""
    variant, scenario = case
    return GoodputTrial(
        scenario=scenario,
        policy=variant.policy,
        rate=rate,
        seed=seed,
        share=experiment.attained,
        warm_up_s=setting.warm_up_s,
        tiers=variant.tiers,
    )


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


def bounds_of(experiment: Experiment) -> dict[str, list[SloBound]]:
    """Return the bounds of each setting whose instances are equal."""
    bounds: dict[str, list[SloBound]] = {}
    for setting in experiment.settings:
        scenario = setting.scenario
        specs = scenario.instance_specs()
        if len(kinds_of(specs)) == 1:
            seeds = range(experiment.first_seed, experiment.first_seed + experiment.seeds)
            bounds[setting.name] = [slo_bound(specs, scenario.workload(setting.first_rate, seed)) for seed in seeds]
    return bounds


def _in_setting(
    experiment: Experiment, setting: ExperimentSetting, runner: Runner, on_trial: Callable[[], None]
) -> dict[str, VariantGoodput]:
    cases = experiment.cases(setting)
    splits, near = _chosen_splits(experiment, setting, cases, runner, on_trial)
    scenarios = {variant.name: split_into(scenario, splits[variant.name]) for variant, scenario in cases}

    goals = goals_of(experiment)

    def measure(seeds: Sequence[int], first_rates: Mapping[str, float]) -> dict[str, list[list[Goodput]]]:
        asked = [
            GoodputCase(
                scenario=scenarios[variant.name],
                policy=variant.policy,
                seed=seed,
                first_rate=first_rates.get(variant.name, setting.first_rate),
                warm_up_s=setting.warm_up_s,
            )
            for variant, _ in cases
            for seed in seeds
        ]
        answers = goodputs(asked, goals, experiment.resolution, runner, on_trial)
        width = len(seeds)
        return {variant.name: answers[place * width : (place + 1) * width] for place, (variant, _) in enumerate(cases)}

    first = measure([0], near)
    known = {name: by_seed[0][0].rate for name, by_seed in first.items() if by_seed[0][0].rate > 0}
    rest = measure(range(1, experiment.seeds), known)
    found = {}
    for variant, _ in cases:
        by_goal = list(zip(*first[variant.name], *rest[variant.name], strict=True))
        found[variant.name] = VariantGoodput(
            num_prefill=splits[variant.name], by_seed=by_goal[0], by_work=by_goal[1] if experiment.work else ()
        )
    return found


def goals_of(experiment: Experiment) -> list[GoodputGoal]:
    """Return what goodput is searched for: by requests, and by work where the experiment asks for it."""
    by_requests = GoodputGoal(share=experiment.attained)
    return [by_requests, replace(by_requests, by_work=True)] if experiment.work else [by_requests]


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
                    warm_up_s=setting.warm_up_s,
                )
            )
    answers = goodputs(asked, goals_of(experiment)[:1], TUNING_RESOLUTION, runner, on_trial)
    rates: dict[str, dict[int, float]] = {}
    for (name, num_prefill), (answer,) in zip(keys, answers, strict=True):
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


def by_work(found: Found) -> Found:
    """Return the same variants, with goodput by work in the place of that by requests."""
    return {
        setting: {name: one.counted_by_work for name, one in variants.items()} for setting, variants in found.items()
    }


def goodput_tables(experiment: Experiment, found: Found, bounds: Bounds) -> list[str]:
    """Return a table for each setting as Markdown, and what serving by deadlines allows there."""
    tables = []
    gains = gains_over_best(experiment, found) if experiment.rivals else {}
    head = ["requests/s", *(["by work"] if experiment.work else []), "prefill instances", "two legs",
            "attained by tokens", "over the best rival"]  # fmt: skip
    for setting, variants in found.items():
        lines = [f"| {setting} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for name, one in variants.items():
            gain = gains.get((setting, name))
            cells = [
                _spread(one.rates),
                *([_spread(one.counted_by_work.rates)] if experiment.work else []),
                str(one.num_prefill),
                _percent(one.mean_of("disaggregated")),
                _percent(one.mean_of("attained_tokens")),
                "" if gain is None else f"{np.mean(gain):+.1%}",
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        if setting in bounds:
            rates = [_spread([bound.rate(goal.share, by_work=goal.by_work) for bound in bounds[setting]])
                     for goal in goals_of(experiment)]  # fmt: skip
            lines.append(f"| {BOUND} | {' | '.join([*rates, *[''] * (len(head) - len(rates))])} |")
        tables.append("\n".join(lines))
    return tables + _optimum_tables(bounds)


def _optimum_tables(bounds: Bounds) -> list[str]:
    if not bounds:
        return []
    lines = [f"| all attained, at best | {' | '.join(TITLES[kind] for kind in KINDS)} |", "|---" * 5 + "|"]
    for setting, each in bounds.items():
        note = ", for longer runs than these" if each[0].is_for_longer_runs(each[0].optimum(TIERS)) else ""
        rates = " | ".join(_spread([one.optimum(kind) for one in each]) for kind in KINDS)
        lines.append(f"| {setting}{note} | {rates} |")
    return ["\n".join(lines)]


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
            total += 6 * len(splits_of(variant, scenario)) + (7 + 3 * experiment.work) * experiment.seeds
    return max(1, total)


def numbers_of(experiment: Experiment, found: Found, bounds: Bounds) -> dict[tuple[str, str, str], list[float]]:
    """Return the numbers of all seeds, by metric, variant and setting; the bounds are those of one variant more."""
    numbers: dict[tuple[str, str, str], list[float]] = {}
    for setting, each in bounds.items():
        for goal in goals_of(experiment):
            name = "work_goodput_qps" if goal.by_work else "goodput_qps"
            numbers[name, BOUND, setting] = [one.rate(goal.share, by_work=goal.by_work) for one in each]
        for kind in KINDS:
            numbers["optimum_qps", kind, setting] = [one.optimum(kind) for one in each]
    for setting, variants in found.items():
        for name, one in variants.items():
            numbers["goodput_qps", name, setting] = one.rates
            if experiment.work:
                numbers["work_goodput_qps", name, setting] = one.counted_by_work.rates
            numbers["num_prefill", name, setting] = [float(one.num_prefill)]
            for metric in ("attained_tokens", "missed_prompt_ratio", "disaggregated"):
                values = [one.at[metric] for one in one.by_seed if one.at.get(metric) is not None]
                if values:
                    numbers[metric, name, setting] = values
    return numbers
