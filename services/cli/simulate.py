"""`block simulate`: simulates a cluster on a virtual clock, by one policy after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from services.cli.first_use import say_if_compiling
from services.cli.mix_options import gain_weights, mix_options, with_mix
from services.cli.progress_bars import bar
from services.cli.simulate_options import policies_in, policy_option, scenario_of, scenario_options
from services.cli.simulate_provisioning import (
    autoscaling_of,
    cost_line,
    provisioning_options,
    provisioning_summary,
)
from services.cli.slo_bound_lines import SHARES, bound_lines, bound_of
from services.result_files import require_writable, write_page, write_rows, write_timeline
from simulator.assembly import simulate as simulate_once
from simulator.autoscaling import AutoscalingOptions, simulate_provisioned
from simulator.field_checks import require_number
from simulator.metrics import SloTarget, summary
from simulator.result import RunResult
from simulator.run_page import ServedRun, run_of_simulation
from simulator.scenario import Scenario
from simulator.service_report import attained_table, service_table
from simulator.traffic import TRACE
from simulator.workload import Workload

COLUMNS = (
    ("ttft mean", ("ttft_s", "mean")),
    ("p99", ("ttft_s", "p99")),
    ("tpot mean", ("tpot_s", "mean")),
    ("p99", ("tpot_s", "p99")),
    ("e2e mean", ("e2e_s", "mean")),
    ("p99", ("e2e_s", "p99")),
)
FATES = ("refused", "shed", "demoted", "lost", "unfinished")  # that are worth a note


@click.command()
@click.argument("trace", required=False)
@policy_option
@scenario_options
@click.option("--rate", type=float, default=None, help="Requests per second.  [default: as recorded in the trace]")
@click.option("--replay", "decisions", metavar="FILE", help="Replay the requests of a scheduler's recorded decisions.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the traffic and of policies."
)
@click.option("--slo-ttft-s", type=float, default=None, help="TTFT target: report the share of requests that meet it.")
@click.option("--slo-tpot-s", type=float, default=None, help="TPOT target.")
@mix_options
@provisioning_options
@click.option(
    "--csv",
    "rows_file",
    metavar="FILE",
    help="Write one row for each request, to .csv or .parquet; {policy} is replaced.",
)
@click.option("--html", "page_file", metavar="FILE", help="Write a page that compares the policies by charts.")
@click.option(
    "--timeline",
    "timeline_file",
    metavar="FILE",
    help="Write all requests by instance as a trace for Perfetto or chrome://tracing; {policy} is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    *,
    trace: str | None,
    policies: tuple[str, ...],
    rate: float | None,
    decisions: str | None,
    seed: int,
    slo_ttft_s: float | None,
    slo_tpot_s: float | None,
    mix_file: str | None,
    priority_weight: tuple[str, ...],
    first_token_weight: float,
    tiers_file: str | None,
    provision: str | None,
    cold_start_s: float,
    rows_file: str | None,
    page_file: str | None,
    timeline_file: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Serve TRACE, or synthetic requests, on a simulated cluster by each policy, and compare the latencies.

    TRACE is JSON lines or CSV, in the format of `block replay` or a public one: Azure, Mooncake, BurstGPT, ShareGPT
    lengths.
    """
    say_if_compiling()
    chosen = policies_in(policies)
    _require_above_zero(rate=rate, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
    scenario = with_mix(scenario_of(trace, flags), mix_file)
    weights = gain_weights(priority_weight, first_token_weight)
    work = _work(scenario, decisions, rate, seed, given_arrivals=flags["arrivals"])
    for flag, file in (("--csv", rows_file), ("--timeline", timeline_file)):
        if file and len(chosen) > 1 and "{policy}" not in file:
            raise ValueError(f"{flag}: name a file with {{policy}} in it where there are several policies")
    if page_file:
        require_writable("html", page_file)
    if timeline_file:
        require_writable("timeline", _file_of(timeline_file, chosen[0]))
    slo = replace(scenario.slo, **{name: value for name, value in
                                   (("ttft_s", slo_ttft_s), ("tpot_s", slo_tpot_s)) if value is not None})  # fmt: skip
    changing = autoscaling_of(tiers_file, provision, cold_start_s, scenario.instance_specs())
    summaries = []
    runs: list[ServedRun] = []
    with bar(len(chosen) * len(work), "requests") as at:
        for place, policy in enumerate(chosen):
            progress = partial(_advance, at, place * len(work))
            result, cost = _run(scenario, work, policy, seed, changing, progress=progress)
            if rows_file:
                write_rows(result, Path(_file_of(rows_file, policy)))
            if timeline_file:
                write_timeline(result, Path(_file_of(timeline_file, policy)))
            found = summary(result, slo if slo != SloTarget() else None, weights=weights)
            summaries.append(found | cost)
            if page_file:
                runs.append(run_of_simulation(result, [*service_table(found), *attained_table(found)]))
    if page_file:
        write_page(page_file, "Simulation", runs)
    bound = bound_of(scenario.instance_specs(), work)
    if as_json:
        total = {"num_instances": len(scenario.instance_specs()), "seed": seed, "policies": summaries}
        print(json.dumps(total if bound is None else {**total, "bound": bound.as_table(SHARES)}))
        return
    _print_table(summaries)
    if bound is not None:
        print("\n".join(["", *bound_lines(bound)]))


def _require_above_zero(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None:
            require_number(name, value, above=0)


def _file_of(name: str, policy: str) -> str:
    return name.replace("{policy}", policy.partition(":")[0])


def _run(
    scenario: Scenario, work: Workload, policy: str, seed: int, changing: AutoscalingOptions | None, *, progress: Any
) -> tuple[RunResult, dict[str, Any]]:
    """Return the result, and what it cost where the cluster changes."""
    specs, conditions = scenario.instance_specs(), scenario.conditions
    if changing is None:
        return simulate_once(specs, work, policy, conditions, seed=seed, progress=progress), {}
    run = simulate_provisioned(specs, work, policy, changing, conditions, seed=seed, progress=progress)
    return run.result, provisioning_summary(run)


def _advance(at: Callable[[int], None], before: int, done: int) -> None:
    at(before + done)


def _work(
    scenario: Scenario, decisions: str | None, rate: float | None, seed: int, given_arrivals: str | None
) -> Workload:
    if decisions is not None:
        from services.cli.simulate_replay import recorded

        if scenario.traffic.trace:
            raise ValueError("--replay: cannot be combined with TRACE")
        return scenario.mixed(recorded(decisions, scenario, rate), seed)
    traffic = scenario.traffic
    if traffic.trace and rate is None and given_arrivals is None and not traffic.schedule:
        scenario = replace(scenario, traffic=replace(traffic, arrivals=TRACE))
    return scenario.workload(rate, seed)


def _print_table(summaries: Sequence[Mapping[str, Any]]) -> None:
    width = max(10, *(len(one["policy"]) for one in summaries))
    print(f"{'policy':{width}}" + "".join(f"{title:>11}" for title, _ in COLUMNS) + f"{'req/s':>9}{'preempted':>11}")
    for one in summaries:
        cells = [one[metric][part] for _, (metric, part) in COLUMNS]
        row = "".join(f"{'never' if value is None else f'{value:.3f}':>11}" for value in cells)
        print(f"{one['policy']:{width}}{row}{one['requests_per_s']:9.2f}{one['num_preemptions']:11}")
    for one in summaries:
        notes = [f"{one[f'num_{name}']} {name}" for name in FATES if one[f"num_{name}"]]
        if "slo_attainment" in one:
            notes.append(f"{one['slo_attainment']:.1%} within the SLO")
        if one["hit_ratio"]:
            notes.append(f"{one['hit_ratio']:.1%} of prompt tokens cached")
        if notes:
            print(f"{one['policy']}: {', '.join(notes)}")
        if "num_moves" in one:
            print(cost_line(one))
    _print_pools([one for one in summaries if "pools" in one], width)
    for one in summaries:
        if lines := [*service_table(one), *attained_table(one)]:
            print("\n".join((lines[0], one["policy"], *lines[1:])))


def _print_pools(summaries: Sequence[Mapping[str, Any]], width: int) -> None:
    """Print the pools of clusters with roles: what share of the time and of the blocks they use, and the legs."""
    titles = ("busy", "blocks", "held", "link busy")
    names = ("busy_share", "used_blocks_share", "held_blocks_share", "link_busy_share")
    if summaries:
        print(f"{'pools':{width}}  {'':14}" + "".join(f"{title:>11}" for title in titles))
    for one in summaries:
        for role, pool in one["pools"].items():
            row = "".join(f"{pool[name]:>11.1%}" if name in pool else f"{'':>11}" for name in names)
            print(f"{one['policy']:{width}}  {pool['num_instances']:3} {role:10}{row}")
        legs = one["legs"]
        if legs["held_s"] is not None:
            print(
                f"{one['policy']:{width}}  {legs['disaggregated']:.1%} with two legs: prefilled after"
                f" {legs['prefill_s']:.3f} s, fetched {legs['held_s']:.3f} s later, first token"
                f" {legs['first_step_s']:.3f} s after that"
            )
