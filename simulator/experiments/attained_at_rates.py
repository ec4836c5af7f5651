"""What share of the requests attains its deadlines at given rates, without a search of the goodput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulator.experiments.experiment import Experiment
from simulator.experiments.experiment_metrics import GOODPUT
from simulator.experiments.goodput_comparison import trial_of
from simulator.goodput import run_trial
from simulator.parallel import Runner

TITLES = ("setting", "variant", "seed", "requests/s", "attained", "of the tokens", "admitted", "of these missed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainedAtRate:
    """What the trial of a variant at a rate has shown; of one that was stopped, shares that cannot be exceeded."""

    setting: str
    variant: str
    seed: int
    rate: float
    attained: float
    attained_tokens: float
    admitted: float | None  # in time by forecast; None for a trial that was stopped
    admitted_missed: float | None  # of these; None where there are none
    is_stopped: bool


def attained_at(
    experiment: Experiment, rates: Sequence[float], runner: Runner, on_progress: Callable[[int, int], None]
) -> list[AttainedAtRate]:
    """Run each variant in each setting at each rate, without a search."""
    if experiment.kind != GOODPUT:
        raise ValueError(f"{experiment.name} does not search for a goodput")
    if any(variant.splits or variant.split_of for variant in experiment.variants):
        raise ValueError(f"{experiment.name} chooses prefill instances by a search")
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError("must be above 0")
    keys, trials = [], []
    for setting in experiment.settings:
        for case in experiment.cases(setting):
            for rate in rates:
                for seed in range(experiment.first_seed, experiment.first_seed + experiment.seeds):
                    keys.append((setting.name, case[0].name, seed, rate))
                    trials.append(trial_of(experiment, setting, case, rate, seed))
    found: dict[int, AttainedAtRate] = {}
    for position, shown in runner(run_trial, trials):
        setting_name, name, seed, rate = keys[position]
        found[position] = AttainedAtRate(
            setting=setting_name,
            variant=name,
            seed=seed,
            rate=rate,
            attained=shown["attained"],
            attained_tokens=shown["attained_tokens"],
            admitted=shown.get("admitted"),
            admitted_missed=shown.get("admitted_missed"),
            is_stopped=bool(shown.get("is_stopped")),
        )
        on_progress(len(found), len(trials))
    return [found[position] for position in sorted(found)]


def attained_table(rows: Sequence[AttainedAtRate]) -> str:
    """Return what trials have shown as Markdown."""
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for row in rows:
        sign = "< " if row.is_stopped else ""
        attained = (f"{sign}{row.attained:.1%}", f"{sign}{row.attained_tokens:.1%}")
        admitted = ("" if share is None else f"{share:.1%}" for share in (row.admitted, row.admitted_missed))
        cells = (row.setting, row.variant, str(row.seed), f"{row.rate:g}", *attained, *admitted)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
