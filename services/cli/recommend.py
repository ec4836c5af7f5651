"""`block recommend`: recommends a policy and a number of instances."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click

from scheduler.provisioning.tiers import tiers_in
from services.cli.first_use import say_if_compiling
from services.cli.mix_options import mix_option, refuse_given, with_mix
from services.cli.progress_bars import show_line
from services.cli.recommend_costs import BY_DEADLINES, CostMeasure
from services.cli.recommend_pools import recommend_by_pools
from services.cli.simulate_options import policies_in, policy_option, runner_for, scenario_of, scenario_options
from services.settings import default_of
from simulator.codec import read_text
from simulator.goodput import GoodputGoal, with_deadlines
from simulator.serving_cost import CostTrial
from simulator.sizing import AttainmentTarget, Recommendation, SizingTarget, Target, recommend
from simulator.traffic import TRACE

ALL = "block,marginal,llumnix,jsq,lmetric,least_loaded,power_of_two,linear,filter,round_robin"
FOR_AUTOSCALE = ("tiers_file", "cold_start_s")


@click.command(name="recommend")
@click.argument("trace", required=False)
@policy_option
@scenario_options
@click.option(
    "--also-profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="Compare engines of this profile as well. Repeatable.",
)
@click.option("--rate", type=float, default=None, help="Requests per second.  [default: as recorded in the trace]")
@click.option(
    "--slo-ttft-s",
    type=float,
    default=None,
    help="Limit of TTFT, in seconds.  [default: 3 if there is no limit at all]",
)
@click.option("--slo-tpot-s", type=float, default=None, help="Limit of TPOT, in seconds.")
@click.option("--slo-e2e-s", type=float, default=None, help="Limit of the end-to-end latency, in seconds.")
@click.option(
    "--percentile",
    type=float,
    default=default_of(Target, "percentile"),
    show_default=True,
    help="Percentile that must stay below the limits.",
)
@mix_option
@click.option(
    "--attained",
    "share",
    type=float,
    default=None,
    help="Size for a share of the requests with all tokens by their deadlines.  [default with --mix: 0.9]",
)
@click.option("--by-work", is_flag=True, help="With --mix: the share is one of the tokens, not of the requests.")
@click.option(
    "--autoscale",
    "autoscale",
    metavar="RULE",
    default=None,
    help="With --mix: show also the cost with a rule that changes the number of instances.",
)
@click.option(
    "--tiers",
    "tiers_file",
    metavar="FILE",
    default=None,
    help="TOML file with a table [[tier]] for each tier, for --autoscale tiers.",
)
@click.option(
    "--cold-start-s",
    type=float,
    default=default_of(CostTrial, "cold_start_s"),
    show_default=True,
    help="With --autoscale: time from the start of an instance until it serves.",
)
@click.option(
    "--max-instances",
    "--most-instances",
    "max_instances",
    type=int,
    default=256,
    show_default=True,
    help="Maximum number of instances.",
)
@click.option(
    "--seeds",
    type=int,
    default=3,
    show_default=True,
    help="Number of samples of traffic, in each of which the SLO must hold.",
)
@click.option(
    "--pools", is_flag=True, help="Size pools of prefill and decode instances, and compare them with co-located ones."
)
@click.option(
    "--instance-price",
    "price",
    type=float,
    default=1.0,
    show_default=True,
    help="With --pools: cost per instance-hour.",
)
@click.option("--workers", type=int, default=None, help="Number of processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def recommend_command(
    *,
    trace: str | None,
    policies: tuple[str, ...],
    profiles: tuple[str, ...],
    rate: float | None,
    slo_ttft_s: float | None,
    slo_tpot_s: float | None,
    slo_e2e_s: float | None,
    percentile: float,
    mix_file: str | None,
    share: float | None,
    by_work: bool,
    autoscale: str | None,
    tiers_file: str | None,
    cold_start_s: float,
    max_instances: int,
    seeds: int,
    pools: bool,
    price: float,
    workers: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Rank policies, with tuned parameters, by the smallest cluster with which the SLO holds.

    With --pools it says how many instances should prefill and how many decode, or whether co-located ones do it with
    fewer. With --mix the SLO is that a share of the requests have all tokens by their deadlines, and the cost is shown
    in instance-seconds per request, beside the least possible.
    """
    say_if_compiling()
    for name, value in (("seeds", seeds), ("max_instances", max_instances)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, not {value}")
    base = with_mix(scenario_of(trace, flags), mix_file)
    if base.traffic.trace and rate is None and flags["arrivals"] is None and not base.traffic.schedule:
        base = replace(base, traffic=replace(base.traffic, arrivals=TRACE))
    target: SizingTarget
    measure = None
    work = base.workload(rate, 0)  # a bad trace is refused here, before any process starts
    if mix_file is None and share is None:
        refuse_given("needs --mix", "by_work", "autoscale", "tiers_file", "cold_start_s")
        target = _target(percentile, slo_ttft_s, slo_tpot_s, slo_e2e_s)
    else:
        refuse_given("--mix and --attained are about deadlines", "slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "percentile")
        refuse_given("needs --autoscale", *(() if autoscale else FOR_AUTOSCALE))
        with_deadlines(work)
        target = AttainmentTarget(goal=GoodputGoal(share=0.9 if share is None else share, by_work=by_work))
        measure = CostMeasure(
            rate=rate, seeds=seeds, rule=autoscale, cold_start_s=cold_start_s, goal=target.goal,
            tiers=() if tiers_file is None else tiers_in(read_text(tiers_file), tiers_file),
            on_progress=partial(_show, base.instances[0].profile),
        )  # fmt: skip
    if pools:
        _refuse_with_pools(profiles, autoscale)
        with runner_for(workers, None) as runner:
            recommend_by_pools(
                base, policies_in(policies) if policies else (), target, rate=rate, seeds=seeds,
                max_instances=max_instances, price=price, measure=measure, runner=runner, as_json=as_json,
            )  # fmt: skip
        return
    chosen = policies_in(policies or (ALL if measure is None else BY_DEADLINES,))
    kinds = {base.instances[0].profile: base}
    kinds |= {profile: base.changed(instances={"profile": profile}) for profile in profiles}
    with runner_for(workers, None) as runner:
        found = [
            (profile, answer)
            for profile, scenario in kinds.items()
            for answer in recommend(
                scenario, chosen, target, rate=rate, seeds=seeds, max_instances=max_instances, runner=runner,
                on_progress=partial(_show, profile),
            )
        ]  # fmt: skip
        costs = None if measure is None else measure.costs(kinds, found, runner)
    show_line()
    if as_json:
        rows = [{"profile": profile, **asdict(answer)} for profile, answer in found]
        total = {"target": asdict(target), "seeds": seeds, "ranking": rows}
        print(json.dumps(total if costs is None else costs.added_to(total)))
        return
    _print_table(found, target, several=len(kinds) > 1)
    if costs is not None:
        print("\n".join(costs.lines()))


def _refuse_with_pools(profiles: tuple[str, ...], autoscale: str | None) -> None:
    for name, given in (("also-profile", profiles), ("autoscale", autoscale)):
        if given:
            raise ValueError(f"--{name}: cannot be combined with --pools")


def _target(percentile: float, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> Target:
    """Return the limits; TTFT below 3 s if there is none."""
    for name, limit in (("slo_ttft_s", ttft_s), ("slo_tpot_s", tpot_s), ("slo_e2e_s", e2e_s)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}: must be a time above 0, not {limit}")
    if ttft_s is None and tpot_s is None and e2e_s is None:
        ttft_s = 3.0
    return Target(percentile=percentile, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def _show(profile: str, what: str) -> None:
    show_line(f"{profile}: {what}")


def _print_table(found: list[tuple[str, Recommendation]], target: SizingTarget, *, several: bool) -> None:
    print(f"instances needed for {target.text}, and the share of the limit used there")
    width = max(len(answer.policy) for _, answer in found)
    for profile, answer in found:
        where = f"{profile}  " if several else ""
        if answer.num_instances is None:
            print(f"{where}{answer.policy:{width}}  never: {answer.used:.2f} times the limit with the most tried")
            continue
        less = "" if answer.used_with_one_less is None else f", with one less {answer.used_with_one_less:.2f}"
        print(f"{where}{answer.policy:{width}}  {answer.num_instances:4}   {answer.used:.2f}{less}")
