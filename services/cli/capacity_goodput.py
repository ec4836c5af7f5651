"""`block capacity --mix`: finds the largest rate at which a share of the requests, or tokens, keep their deadlines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.cli.progress_bars import show_line
from services.cli.slo_bound_lines import SHARES, bound_lines, bound_of
from simulator.capacity import half_width
from simulator.goodput import Goodput, GoodputCase, GoodputGoal, goodputs, with_deadlines
from simulator.parallel import Runner
from simulator.scenario import Scenario
from simulator.slo_bound import SloBound

FIRST_OF_BOUND = 0.7  # where the search starts, as a share of the bound


def find_goodput(
    scenario: Scenario, policies: Sequence[str], shares: Sequence[float], *, seeds: int, resolution: float,
    first_rate: float | None, warm_up_s: float, runner: Runner, as_json: bool,
) -> None:  # fmt: skip
    """Find and print the goodput of each policy, by requests and by work, beside the bound."""
    shares = tuple(dict.fromkeys(shares or SHARES))
    goals = [GoodputGoal(share=share, by_work=by_work) for by_work in (False, True) for share in shares]
    num = len(scenario.instance_specs())
    work = scenario.workload(first_rate or 2.5 * num, 0)
    with_deadlines(work)
    bound = bound_of(scenario.instance_specs(), work)
    if first_rate is None:
        at_most = math.inf if bound is None else FIRST_OF_BOUND * bound.rate(min(shares))
        first_rate = at_most if 0 < at_most < math.inf else 2.5 * num
    num_trials = 0

    def on_trial() -> None:
        nonlocal num_trials
        num_trials += 1
        show_line(f"{num_trials} trials")

    cases = [
        GoodputCase(scenario=scenario, policy=policy, seed=seed, first_rate=first_rate, warm_up_s=warm_up_s)
        for policy in policies
        for seed in range(seeds)
    ]
    answers = goodputs(cases, goals, resolution, runner, on_trial)
    show_line()
    found: dict[str, list[Sequence[Goodput]]] = {
        policy: list(zip(*answers[place * seeds : (place + 1) * seeds], strict=True))
        for place, policy in enumerate(policies)
    }
    if as_json:
        rows = [_row(policy, goals, by_goal) for policy, by_goal in found.items()]
        limits = None if bound is None else bound.as_table(shares)
        print(json.dumps({"num_instances": num, "num_trials": num_trials, "policies": rows, "bound": limits}))
    else:
        _print_table(found, goals, num, bound, shares)


def _row(policy: str, goals: Sequence[GoodputGoal], by_goal: Sequence[Sequence[Goodput]]) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy, "goodput_qps": {}, "work_goodput_qps": {}}
    for goal, found in zip(goals, by_goal, strict=True):
        rates = [one.rate for one in found]
        missed = [ratio for one in found if (ratio := one.at.get("missed_prompt_ratio")) is not None]
        row["work_goodput_qps" if goal.by_work else "goodput_qps"][f"{goal.share:g}"] = {
            "mean": float(np.mean(rates)),
            "ci95": half_width(rates),
            "per_seed": rates,
            "missed_prompt_ratio": float(np.mean(missed)) if missed else None,
        }
    return row


def _print_table(
    found: dict[str, list[Sequence[Goodput]]],
    goals: Sequence[GoodputGoal],
    num: int,
    bound: SloBound | None,
    shares: Sequence[float],
) -> None:
    print(f"requests/s on {num} instances at which so many have all tokens by their deadlines")
    width = max(10, *map(len, found))
    titles = [f"{100 * goal.share:g} % {'of tokens' if goal.by_work else 'of requests'}" for goal in goals]
    print(" " * width + "".join(f"{title:>20}" for title in titles))
    for policy, by_goal in found.items():
        rates = [[one.rate for one in each] for each in by_goal]
        cells = (f"{np.mean(each):.2f} ± {half_width(each):.2f}" for each in rates)
        print(f"{policy:{width}}" + "".join(f"{cell:>20}" for cell in cells))
    if bound is not None:
        for line in bound_lines(bound, shares):
            print(line)
