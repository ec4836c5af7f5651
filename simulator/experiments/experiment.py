"""An experiment: a scenario in some settings, the policies that are compared in it, and the paper's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from predictor.suggestions import did_you_mean
from scheduler.provisioning.tiers import Tiers
from simulator.capacity import LatencyObjective
from simulator.experiments import autoscaling_shapes
from simulator.experiments.claims import Claim, Turn
from simulator.scenario import Scenario


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
