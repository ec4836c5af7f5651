"""`block capacity`: the largest rate at which an SLO holds."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from services.cli.simulate_options import policies_in, policy_option, runner_for, scenario_of, scenario_options
from simulator.capacity import Capacity, Objective, Search, Trial, capacities, gain

METRICS = ("ttft_s", "tpot_s", "e2e_s")


@click.command()
@click.argument("trace", required=False)
@policy_option
@scenario_options
@click.option("--metric", type=click.Choice(METRICS), default="ttft_s", show_default=True)
@click.option("--percentile", type=float, default=99.0, show_default=True)
@click.option("--limit-s", type=float, default=3.0, show_default=True, help="That percentile is to stay below.")
@click.option("--seeds", type=int, default=5, show_default=True, help="Samples of traffic to begin with.")
@click.option("--most-seeds", type=int, default=None, help="Add samples up to so many, for --precision.")
@click.option("--precision", type=float, default=0.01, show_default=True, help="Relative half-width of the interval.")
@click.option("--resolution", type=float, default=0.005, show_default=True, help="Relative width of a bracket.")
@click.option("--first-rate", type=float, default=None, help="Where to begin.  [default: 2.5 an instance]")
@click.option("--workers", type=int, default=None, help="Processes.  [default: one per core]")
@click.option(
    "--ray", metavar="[ADDRESS]", is_flag=False, flag_value="local", default=None, help="Run on a Ray cluster."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def capacity(
    *,
    trace: str | None,
    policies: tuple[str, ...],
    metric: str,
    percentile: float,
    limit_s: float,
    seeds: int,
    most_seeds: int | None,
    precision: float,
    resolution: float,
    first_rate: float | None,
    workers: int | None,
    ray: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Find by bisection, with several seeds, the largest rate at which the SLO holds, for each policy."""
    chosen = policies_in(policies)
    scenario = scenario_of(trace, flags)
    for name, value in (("precision", precision), ("resolution", resolution)):
        if not 0 < value < 1:
            raise ValueError(f"{name}: must lie between 0 and 1, not {value}")
    if seeds < 2:
        raise ValueError(f"seeds: must be at least 2, as one tells nothing about noise, not {seeds}")
    if first_rate is not None and not 0 < first_rate < 1e6:
        raise ValueError(f"first_rate: must be a number above 0, not {first_rate}")
    num = len(scenario.units())
    search = Search(
        resolution=resolution,
        precision=precision,
        seeds=seeds,
        max_seeds=max(seeds, most_seeds or seeds),
        first_rate=first_rate or 2.5 * num,
        paired=len(chosen) > 1,
    )
    objective = Objective(metric=metric, percentile=percentile, limit_s=limit_s)
    scenario.workload(search.first_rate, 0)  # a bad trace is refused here, not in a process far away
    num_trials = 0

    def told(trial: Trial, value_s: float) -> None:
        nonlocal num_trials
        num_trials += 1
        if sys.stderr.isatty():
            print(
                f"\r{num_trials} trials, last: {trial.policy} at {trial.rate:.2f}/s, {value_s:.2f} s\x1b[K",
                end="",
                file=sys.stderr,
            )

    with runner_for(workers, ray) as runner:
        found = capacities([(scenario, policy) for policy in chosen], objective, search, runner, told)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if as_json:
        print(
            json.dumps({"num_instances": num, "objective": asdict(objective), "policies": [asdict(f) for f in found]})
        )
        return
    _print_table(found, objective, num)


def _print_table(found: list[Capacity], objective: Objective, num: int) -> None:
    print(f"requests/s with P{objective.percentile:g} {objective.metric} < {objective.limit_s:g} s on {num} instances")
    width = max(10, *(len(one.policy) for one in found))
    for one in found:
        line = f"{one.policy:{width}} {one.mean:9.2f} ± {one.ci95:.2f}"
        if one is not found[0]:
            share, half = gain(one, found[0])
            line += f"   {share:+.1%} ± {half:.1%} over {found[0].policy}"
        print(line)
