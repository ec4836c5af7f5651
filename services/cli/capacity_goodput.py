"""`block capacity --mix`: finds the largest rate at which a share of the requests, or tokens, keep their deadlines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scheduler.policy import policy_from
from scheduler.provisioning.tiers import Tiers, require_room
from services.cli.group_table import group_table
from services.cli.progress_bars import show_line
from services.cli.slo_bound_lines import SHARES, bound_lines, bound_of
from simulator.capacity import half_width
from simulator.goodput import Goodput, GoodputCase, GoodputGoal, goodputs, with_deadlines
from simulator.mean_report import mean_report
from simulator.parallel import Runner
from simulator.scenario import Scenario
from simulator.slo_bound import SloBound

FIRST_OF_BOUND = 0.7  # where the search starts, as a share of the bound
AT_LEAST = "≥: the SLO holds even where all requests arrive at once; more of them show the rate (--num-requests)"
NEVER = "a seed counts as 0 where the SLO is missed at all rates, even where requests hardly meet"


def find_goodput(
    scenario: Scenario, policies: Sequence[str], shares: Sequence[float], *, seeds: int, resolution: float,
    first_rate: float | None, warm_up_s: float, tiers: Tiers, runner: Runner, as_json: bool,
) -> None:  # fmt: skip
    """Find and print the goodput of each policy, by requests and by work, beside the bound."""
    shares = tuple(dict.fromkeys(shares or SHARES))
    goals = [GoodputGoal(share=share, by_work=by_work) for by_work in (False, True) for share in shares]
    num = len(scenario.instance_specs())
    if tiers:
        _require_tiers(tiers, policies, num)
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
        GoodputCase(
            scenario=scenario, policy=policy, seed=seed, first_rate=first_rate, warm_up_s=warm_up_s, tiers=tiers
        )
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


def _require_tiers(tiers: Tiers, policies: Sequence[str], num: int) -> None:
    """Reject tiers that do not fit, before any process starts."""
    require_room(tiers, num)
    for policy in policies:
        if not policy_from(policy).needs_forecast:
            raise ValueError(f"policy: {policy} makes no forecasts, which --tiers needs")


def _row(policy: str, goals: Sequence[GoodputGoal], by_goal: Sequence[Sequence[Goodput]]) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy, "goodput_qps": {}, "work_goodput_qps": {}}
    for goal, found in zip(goals, by_goal, strict=True):
        rates = [one.rate for one in found]
        missed = [ratio for one in found if (ratio := one.at.get("missed_prompt_ratio")) is not None]
        serving = [one.at["num_serving"] for one in found if "num_serving" in one.at]
        at_least = any(one.at_least for one in found)
        row["work_goodput_qps" if goal.by_work else "goodput_qps"][f"{goal.share:g}"] = {
            "mean": float(np.mean(rates)),
            "ci95": None if at_least else half_width(rates),
            "at_least": at_least,
            "per_seed": rates,
            **_report_at(found),
            "missed_prompt_ratio": float(np.mean(missed)) if missed else None,
            **({"num_serving": float(np.mean(serving))} if serving else {}),
        }
    return row


def _report_at(found: Sequence[Goodput]) -> dict[str, Any]:
    """Return what all requests and each group attained at the goodput, averaged over seeds that have one."""
    return mean_report([one.at["report"] for one in found if "report" in one.at])


def rate_cell(rates: Sequence[float], *, at_least: bool) -> str:
    """Return a mean over seeds with its interval, or as a lower limit."""
    mean = float(np.mean(rates))
    return f"≥ {mean:.2f}" if at_least else f"{mean:.2f} ± {half_width(rates):.2f}"


def notes(rates: Sequence[float], *, at_least: bool) -> Iterator[str]:
    """Explain rates whose search stayed open at one end."""
    if at_least:
        yield AT_LEAST
    if 0 in rates:
        yield NEVER


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
        cells = (rate_cell([one.rate for one in each], at_least=any(one.at_least for one in each)) for each in by_goal)
        print(f"{policy:{width}}" + "".join(f"{cell:>20}" for cell in cells))
    every = [one for by_goal in found.values() for each in by_goal for one in each]
    for line in notes([one.rate for one in every], at_least=any(one.at_least for one in every)):
        print(line)
    for policy, by_goal in found.items():
        reports = {title: _report_at(each) for title, each in zip(titles, by_goal, strict=True)}
        for line in group_table(f"{policy}: requests of each group with all tokens by their deadlines there", reports):
            print(line)
    if bound is not None:
        for line in bound_lines(bound, shares):
            print(line)
