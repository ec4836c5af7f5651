"""`block forecast`: forecasts a request as the sidecar does."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import click

from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.forecast_result import Forecast
from predictor.lengths import DEFAULT_RESIDUAL, RESIDUALS
from services.cli.engine_options import profile_named
from services.cli.first_use import say_if_compiling
from services.settings import A30_PROFILE
from simulator.codec import plain, read_json, request_from, snapshot_from

NEUTRAL_PACE = 1.0
COLUMNS = (
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "num_preemptions",
    "prefix_hit_tokens",
    "delay_sum_s",
    "delay_worst_s",
)


@click.command()
@click.argument("snapshot")
@click.argument("request_file", metavar="REQUEST")
@click.option(
    "--profile",
    "-p",
    "profile_name",
    metavar="NAME|FILE",
    default=A30_PROFILE,
    show_default=True,
    envvar="BLOCK_PROFILE",
    help="Latency profile: the name of a shipped one, or a JSON file.",
)
@click.option(
    "--residual",
    type=click.Choice(tuple(RESIDUALS)),
    default=DEFAULT_RESIDUAL,
    show_default=True,
    help="How the rest of a response is predicted once it has started.",
)
@click.option(
    "--pace", type=float, default=NEUTRAL_PACE, show_default=True, help="Ratio of real to predicted step times."
)
@click.option(
    "--delays/--no-delays", default=True, show_default=True, help="Forecast the delay of the other requests as well."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def forecast(
    snapshot: str, request_file: str, profile_name: str, residual: str, pace: float, *, delays: bool, as_json: bool
) -> None:
    """Forecast REQUEST (JSON, one or a list) on the engine of SNAPSHOT (JSON); - is standard input."""
    say_if_compiling()
    profile = profile_named(profile_name)
    try:
        state = snapshot_from(read_json(snapshot))
        engine = engine_from(state, profile.step_time, residual)
    except ValueError as error:
        raise ValueError(f"{snapshot}: {error}") from None
    engine.set_pace(pace)
    data = read_json(request_file)
    many = data if isinstance(data, list) else [data]
    block_size = state.config.block_size
    try:
        candidates = [
            request_from(one, block_size=block_size, default_id=f"candidate-{n}") for n, one in enumerate(many)
        ]
        forecasts = Forecaster(engine).forecast(candidates, state.taken_s, delays=delays)
    except ValueError as error:
        raise ValueError(f"{request_file}: {error}") from None
    forecasts = [
        one if engine.knows_hits(is_named=bool(request.prefix_hashes)) else replace(one, prefix_hit_tokens=None)
        for request, one in zip(candidates, forecasts, strict=True)
    ]
    if as_json:
        json.dump(plain({"profile": profile.name, "forecasts": [asdict(item) for item in forecasts]}), sys.stdout)
        print()
    else:
        _print_table(forecasts)


def _print_table(forecasts: list[Forecast]) -> None:
    print("".join(f"{name:>18}" for name in ("request_id", *COLUMNS)))
    for item in forecasts:
        print("".join(f"{_cell(getattr(item, name)):>18}" for name in ("request_id", *COLUMNS)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
