"""`block capacity`: finds the largest rate at which an SLO holds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import click

from scheduler.provisioning.tiers import tiers_in
from services.cli.capacity_goodput import find_goodput, notes
from services.cli.first_use import say_if_compiling
from services.cli.mix_options import mix_option, refuse_given, with_mix
from services.cli.progress_bars import show_line
from services.cli.simulate_options import policies_in, policy_option, runner_for, scenario_of, scenario_options
from services.settings import default_of
from simulator.capacity import Capacity, LatencyObjective, Search, Trial, capacities, gain
from simulator.codec import read_text

METRICS = ("ttft_s", "tpot_s", "e2e_s")
FOR_LATENCIES = ("metric", "percentile", "limit_s", "max_seeds", "precision")  # options without a meaning for goodput


@click.command()
@click.argument("trace", required=False)
@policy_option
@scenario_options
@mix_option
@click.option(
    "--attained",
    "shares",
    type=float,
    multiple=True,
    help="Goodput: share of the requests, or of their tokens, that must have all tokens by their deadlines. Repeatable."
    "  [default with --mix: 0.9 and 0.99]",
)
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    default=default_of(LatencyObjective, "metric"),
    show_default=True,
    help="Latency that the SLO limits.",
)
@click.option(
    "--percentile",
    type=float,
    default=default_of(LatencyObjective, "percentile"),
    show_default=True,
    help="Percentile of the latency that must stay below the limit.",
)
@click.option(
    "--limit-s",
    type=float,
    default=default_of(LatencyObjective, "limit_s"),
    show_default=True,
    help="Limit of that percentile, in seconds.",
)
@click.option(
    "--seeds",
    type=int,
    default=default_of(Search, "seeds"),
    show_default=True,
    help="Number of samples of traffic at first.",
)
@click.option(
    "--max-seeds",
    "--most-seeds",
    "max_seeds",
    type=int,
    default=None,
    help="Maximum number of samples, added until --precision is reached.  [default: the value of --seeds]",
)
@click.option(
    "--precision",
    type=float,
    default=default_of(Search, "precision"),
    show_default=True,
    help="Relative half-width of the confidence interval.",
)
@click.option(
    "--resolution",
    type=float,
    default=default_of(Search, "resolution"),
    show_default=True,
    help="Relative width of a bracket of the bisection.",
)
@click.option(
    "--first-rate", type=float, default=None, help="Rate of the first trial.  [default: 2.5 for each instance]"
)
@click.option(
    "--warm-up",
    "warm_up_s",
    type=float,
    default=0.0,
    show_default=True,
    help="Goodput: seconds before and after the requests that count, in which more requests arrive.",
)
@click.option(
    "--tiers",
    "tiers_file",
    metavar="FILE",
    default=None,
    help="Goodput: TOML file with a table [[tier]] for each tier, between which instances move.",
)
@click.option("--workers", type=int, default=None, help="Number of processes.  [default: one per core]")
@click.option(
    "--ray", metavar="[ADDRESS]", is_flag=False, flag_value="local", default=None, help="Run on a Ray cluster."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def capacity(
    *,
    trace: str | None,
    policies: tuple[str, ...],
    mix_file: str | None,
    shares: tuple[float, ...],
    metric: str,
    percentile: float,
    limit_s: float,
    seeds: int,
    max_seeds: int | None,
    precision: float,
    resolution: float,
    first_rate: float | None,
    warm_up_s: float,
    tiers_file: str | None,
    workers: int | None,
    ray: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Find the largest rate at which the SLO holds, for each policy, by bisection with several seeds.

    With --mix or --attained it is the goodput: the largest rate at which a share of the requests of a mix, or of their
    tokens, have all tokens by their deadlines.
    """
    say_if_compiling()
    chosen = policies_in(policies)
    scenario = with_mix(scenario_of(trace, flags), mix_file)
    for name, value in (("precision", precision), ("resolution", resolution)):
        if not 0 < value < 1:
            raise ValueError(f"{name}: must lie between 0 and 1, not {value}")
    if seeds < 2:
        raise ValueError(f"seeds: must be at least 2, as one shows no noise, not {seeds}")
    if first_rate is not None and not 0 < first_rate < 1e6:
        raise ValueError(f"first_rate: must be a number above 0, not {first_rate}")
    if not 0 <= warm_up_s < math.inf:
        raise ValueError(f"--warm-up: must be a time from 0 on, not {warm_up_s}")
    if mix_file is not None or shares:
        refuse_given("is for latencies; --mix and --attained are about deadlines", *FOR_LATENCIES)
        tiers = () if tiers_file is None else tiers_in(read_text(tiers_file), tiers_file)
        with runner_for(workers, ray) as runner:
            find_goodput(
                scenario, chosen, shares, seeds=seeds, resolution=resolution, first_rate=first_rate,
                warm_up_s=warm_up_s, tiers=tiers, runner=runner, as_json=as_json,
            )  # fmt: skip
        return
    refuse_given("is for goodput; give --mix or --attained as well", "warm_up_s", "tiers_file")
    num = len(scenario.instance_specs())
    search = Search(
        resolution=resolution,
        precision=precision,
        seeds=seeds,
        max_seeds=max(seeds, max_seeds or seeds),
        first_rate=first_rate or 2.5 * num,
        paired=len(chosen) > 1,
    )
    objective = LatencyObjective(metric=metric, percentile=percentile, limit_s=limit_s)
    scenario.workload(search.first_rate, 0)  # a bad trace is refused here, before any process starts
    num_trials = 0

    def show(trial: Trial, value_s: float) -> None:
        nonlocal num_trials
        num_trials += 1
        show_line(f"{num_trials} trials, last: {trial.policy} at {trial.rate:.2f}/s, {value_s:.2f} s")

    with runner_for(workers, ray) as runner:
        found = capacities([(scenario, policy) for policy in chosen], objective, search, runner, show)
    show_line()
    if as_json:
        rows = [asdict(one) | ({"ci95": None} if one.at_least else {}) for one in found]
        print(json.dumps({"num_instances": num, "objective": asdict(objective), "policies": rows}))
        return
    _print_table(found, objective, num)


def _print_table(found: list[Capacity], objective: LatencyObjective, num: int) -> None:
    print(f"requests/s with P{objective.percentile:g} {objective.metric} < {objective.limit_s:g} s on {num} instances")
    width = max(10, *(len(one.policy) for one in found))
    for one in found:
        line = f"{one.policy:{width}} {one.mean:9.2f} ± {one.ci95:.2f}"
        if one.at_least:
            line = f"{one.policy:{width}} ≥ {one.mean:7.2f}"
        elif one is not found[0] and not found[0].at_least and min(found[0].per_seed) > 0:
            share, half = gain(one, found[0])
            line += f"   {share:+.1%} ± {half:.1%} over {found[0].policy}"
        print(line)
    for note in notes([rate for one in found for rate in one.per_seed], at_least=any(one.at_least for one in found)):
        print(note)
