"""Compares what serving by deadlines costs: fixed clusters as small as they may be, and instances that join tiers.

A fixed cluster attains the share at a rate, where one instance less does not; all its instances cost all the time. Of
instances that move between tiers, those of the best-effort pool cost nothing (PolyServe §5.4), and there are as many as
the scenario has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler.provisioning.tiers import require_room
from simulator.experiments.goodput_comparison import trial_of
from simulator.goodput import GoodputTrial, run_trial
from simulator.parallel import Runner
from simulator.sizing import sized
from simulator.slo_bound import TIERS, slo_bound

if TYPE_CHECKING:
    from simulator.experiments.experiment import Experiment, ExperimentSetting, Variant

OPTIMUM = "optimum, tiers apart"
COST, NUM_INSTANCES = "instance_s_per_request", "num_instances"
METRICS = (COST, NUM_INSTANCES, "attained", "attained_tokens")
STEP = 1.25  # of sizes, as long as only one side of the smallest one is known
TRIALS = 6  # of a search, for a progress bar
UNUSED = ("plots", "work", "bound", "claims", "turn", "gain_name", "tuning_requests")

Costs = Mapping[str, Mapping[tuple[str, str, float], Sequence[float]]]  # by metric; by setting, variant and rate


def require_comparable(
    table: Mapping[str, Any], settings: Sequence[ExperimentSetting], variants: Sequence[Variant]
) -> None:
    """Refuse what experiments of kind cost have no use for, naming the field."""
    for name in UNUSED:
        if name in table:
            raise ValueError(f"{name}: experiments of kind cost have none")
    for variant in variants:
        if variant.splits or variant.split_of:
            raise ValueError(f"policies.splits: experiments of kind cost have none, but {variant.name!r} does")
    for setting in settings:
        if setting.saturated_rate is not None:
            raise ValueError("saturated_rate: experiments of kind cost have none")
        for variant in variants:
            scenario = setting.scenario.changed(**variant.changes)
            sized(scenario, 1)
            require_room(variant.tiers, scenario.instances[0].count)


def compare(experiment: Experiment, runner: Runner, on_progress: Callable[[int, int], None]) -> Costs:
    """Measure all variants in all settings at all rates; each round has a trial of every search that goes on."""
    optima_s = {
        (setting.name, rate): [
            _optimum_s(setting, rate, experiment.first_seed + seed) for seed in range(experiment.seeds)
        ]
        for setting in experiment.settings
        for rate in setting.rates
    }
    searches = _searches(experiment, optima_s)
    estimate = sum(1 if one.trial.tiers else TRIALS for one in searches.values())
    num_done = 0
    while going_on := [search for search in searches.values() if not search.has_ended]:
        trials = [search.next_trial() for search in going_on]
        for position, shown in runner(run_trial, trials):
            going_on[position].learn(shown)
            num_done += 1
            on_progress(min(num_done, estimate - 1), estimate)
    on_progress(estimate, estimate)
    found: dict[str, dict[tuple[str, str, float], list[float]]] = {metric: {} for metric in METRICS}
    for (setting_name, variant_name, rate, _), search in searches.items():
        for metric, value in search.found(rate).items():
            found[metric].setdefault((setting_name, variant_name, rate), []).append(value)
    for values in found.values():
        for case in [case for case, of_seeds in values.items() if len(of_seeds) < experiment.seeds]:
            del values[case]  # with some seed, no size attains the share
    for (setting_name, rate), each_s in optima_s.items():
        if all(map(math.isfinite, each_s)):
            found[COST][setting_name, OPTIMUM, rate] = each_s
            found[NUM_INSTANCES][setting_name, OPTIMUM, rate] = [rate * one for one in each_s]
    return found


def _searches(
    experiment: Experiment, optima_s: Mapping[tuple[str, float], Sequence[float]]
) -> dict[tuple[str, str, float, int], _SizeSearch]:
    """Begin the search of each setting, variant, rate and seed with as many instances as the optimum has."""
    searches = {}
    for setting in experiment.settings:
        for case in experiment.cases(setting):
            for rate in setting.rates:
                for seed, optimum_s in enumerate(optima_s[setting.name, rate]):
                    trial = trial_of(experiment, setting, case, rate, seed)
                    searches[setting.name, case[0].name, rate, seed] = _search(trial, rate * optimum_s)
    return searches


def _optimum_s(setting: ExperimentSetting, rate: float, seed: int) -> float:
    scenario = setting.scenario
    return slo_bound(scenario.instance_specs(), scenario.workload(rate, seed)).optimum_s[TIERS]


def _search(trial: GoodputTrial, first: float) -> _SizeSearch:
    """Begin with a number of instances, or with all of them where they move between tiers."""
    most = trial.scenario.instances[0].count
    size = most if trial.tiers else max(1, math.ceil(min(most, first)))
    return _SizeSearch(trial=trial, most=most, next_size=size)


@dataclass(slots=True, kw_only=True)
class _SizeSearch:
    """The search for a fixed cluster that attains the share while one instance less does not, or one trial with tiers.

    It takes for granted that more instances attain more, which need not be so with a single seed.
    """

    trial: GoodputTrial
    most: int
    next_size: int
    low: int = 0  # the largest size that is known not to attain the share
    high: int | None = None  # the smallest size that attains it
    at: dict[str, Any] = field(default_factory=dict)  # what the trial of that size has shown

    @property
    def has_ended(self) -> bool:
        """Whether the smallest size is known, or no size attains the share."""
        if self.trial.tiers:
            return self.high is not None or self.low == self.most
        return self.low == self.most or (self.high is not None and self.high - self.low == 1)

    def next_trial(self) -> GoodputTrial:
        """Return the trial of the next size."""
        return replace(self.trial, scenario=sized(self.trial.scenario, self.next_size))

    def learn(self, shown: dict[str, Any]) -> None:
        """Learn whether a size attains the share, and choose the next one."""
        size = self.next_size
        if shown["attained"] >= self.trial.share:
            self.high, self.at = size, shown
            smaller = math.floor(size / STEP) if self.low == 0 else (self.low + size) // 2
            self.next_size = max(self.low + 1, min(size - 1, smaller))
        else:
            self.low = size
            larger = math.ceil(size * STEP) if self.high is None else (size + self.high) // 2
            self.next_size = min(self.most, max(size + 1, larger))

    def found(self, rate: float) -> dict[str, float]:
        """Return the cost and what was attained; nothing where no size attains the share."""
        if self.high is None:
            return {}
        num = float(self.at.get("num_serving", self.high))
        shares = {name: float(self.at[name]) for name in ("attained", "attained_tokens")}
        return {COST: num / rate, NUM_INSTANCES: num, **shares}


def savings(experiment: Experiment, costs: Costs) -> dict[tuple[str, str, float], list[float]]:
    """Return what a variant costs less than the cheapest rival, as a share of that, by setting, variant and rate."""
    saved, cost = {}, costs[COST]
    for (setting, name, rate), values in cost.items():
        rivals = [cost[setting, rival, rate] for rival in experiment.rivals if (setting, rival, rate) in cost]
        if name in experiment.rivals or not rivals:
            continue
        least = min(rivals, key=np.mean)
        saved[setting, name, rate] = [1 - one / other for one, other in zip(values, least, strict=True)]
    return saved
