"""`block replay`: replays requests on one simulated engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from dataclasses import replace as replace_fields
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

import click
import numpy as np

from predictor.config import EngineConfig
from predictor.gain import attainment_report, attainment_table
from predictor.outcome import Outcome
from predictor.request import RequestFacts
from predictor.step_time import StepTime
from services.cli.engine_options import ENGINE, engine_of
from services.cli.first_use import say_if_compiling
from services.cli.mix_options import gain_weights, mix_options, objectives_given
from services.cli.settings_options import SettingValues, settings_options
from services.result_files import require_writable, write_page
from simulator.codec import plain, requests_from_file
from simulator.mix import mix_from_file, mixed, require_objectives
from simulator.progress import followed
from simulator.replay import replay as replay_requests
from simulator.replay import replay_steps, served_requests
from simulator.run_page import ServedRun, run_of_replay

METRICS = ("ttft_s", "tpot_s", "e2e_s")
OUTCOME_FIELDS = (*(spec.name for spec in fields(Outcome)), *METRICS)


@click.command()
@click.argument("requests_file", metavar="REQUESTS")
@settings_options(ENGINE)
@click.option(
    "--steps",
    "steps_file",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    default=None,
    help="Write one JSON line per step to FILE; without FILE to standard output, in place of the table.",
)
@mix_options
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the draw from the mix.")
@click.option("--html", "page_file", metavar="FILE", help="Write a page with charts of the latencies.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    given: SettingValues,
    requests_file: str,
    *,
    steps_file: str | None,
    mix_file: str | None,
    priority_weight: tuple[str, ...],
    first_token_weight: float,
    seed: int,
    page_file: str | None,
    as_json: bool,
) -> None:
    """Replay REQUESTS (JSON lines, JSON array or CSV) on one simulated engine, and report their latencies.

    A request has prompt_tokens (a count, or the token ids) and output_tokens, and may have arrival_s, max_tokens,
    priority, request_class, weight, slo (an object with ttft_s and tpot_s), prefix_hashes and request_id.
    """
    if page_file is not None:
        require_writable("html", page_file)
    say_if_compiling()
    profile, config = engine_of(given)
    weights = gain_weights(priority_weight, first_token_weight)
    requests = requests_from_file(requests_file, block_size=config.block_size)
    entries: list[str] | None = None
    if mix_file is not None:
        mix, objectives = mix_from_file(mix_file), objectives_given()
        require_objectives(mix, objectives)
        requests, drawn = mixed(requests, mix, seed, objectives)
        entries = [entry.name for entry in drawn]
    if steps_file is not None:
        if as_json and steps_file == "-":
            raise ValueError("--steps: name a file when --json has standard output")
        with _opened(steps_file) as out:
            _write_steps(config, profile.step_time, requests, out)
        if steps_file == "-":
            return
    outcomes = replay_requests(config, profile.step_time, requests)
    served = served_requests(requests, outcomes)
    if entries is not None:
        served = replace_fields(served, levels=replace_fields(served.levels, mix_entry=np.array(entries)))
    total = {**summary(outcomes), **attainment_report(served, weights)}
    if page_file is not None:
        write_page(page_file, f"Replay of {Path(requests_file).name}", [page_of(profile.name, outcomes, total)])
    if as_json:
        rows = [row_of(outcome) for outcome in outcomes]
        print(json.dumps({"profile": profile.name, "requests": rows, "summary": total}))
    else:
        _print_table(outcomes, total)


@contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
        return
    try:
        with Path(path).open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None


def _write_steps(config: EngineConfig, step_time: StepTime, requests: list[RequestFacts], out: TextIO) -> None:
    steps = followed(replay_steps(config, step_time, requests), "writing steps")
    out.writelines(json.dumps(plain(step)) + "\n" for step in steps)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Convert the outcome of a request to JSON; a time that was never reached is null."""
    return {name: getattr(outcome, name) for name in OUTCOME_FIELDS}


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Summarise a replay."""
    ended = [o.finished_s for o in outcomes if o.finished_s is not None]
    result: dict[str, Any] = {
        "num_requests": len(outcomes),
        "num_unfinished": len(outcomes) - len(ended),
        "makespan_s": max(ended, default=0.0) - min(o.arrival_s for o in outcomes),
        "num_preemptions": sum(o.num_preemptions for o in outcomes),
    }
    for name in METRICS:
        values = [value for o in outcomes if (value := getattr(o, name)) is not None]
        if values:
            p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
            result[name] = {"mean": fmean(values), "p50": p50, "p90": p90, "p99": p99}
    return result


def page_of(profile: str, outcomes: Sequence[Outcome], total: dict[str, Any]) -> ServedRun:
    """Take a replay for a page."""
    ends = f"{total['num_requests']} requests in {total['makespan_s']:.3f} s, {total['num_preemptions']} preemptions"
    return run_of_replay(profile, outcomes, [ends, *attainment_table(total)])


def _print_table(outcomes: list[Outcome], total: dict[str, Any]) -> None:
    print(
        f"{'request':>12}{'arrival_s':>12}{'prompt':>8}{'output':>8}{'hits':>7}{'ttft_s':>10}{'tpot_s':>10}{'e2e_s':>10}{'preempted':>11}"
    )
    for o in outcomes:
        times = "".join(
            f"{'never' if value is None else f'{value:.4f}':>10}" for value in (o.ttft_s, o.tpot_s, o.e2e_s)
        )
        counts = f"{o.prompt_tokens:>8}{o.output_tokens:>8}{o.prefix_hit_tokens:>7}"
        print(f"{o.request_id:>12}{o.arrival_s:>12.3f}{counts}{times}{o.num_preemptions:>11}")
    print()
    for name in METRICS:
        if name in total:
            print(f"{name:>8}  " + "  ".join(f"{key} {value:.4f}" for key, value in total[name].items()))
    print(
        f"{total['num_requests']} requests in {total['makespan_s']:.3f} s, {total['num_preemptions']} preemptions",
        end="",
    )
    print(f", {total['num_unfinished']} never finish" if total["num_unfinished"] else "")
    for line in attainment_table(total):
        print(line)
