"""`block bench`: load on an OpenAI endpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.server_options import use_file

if TYPE_CHECKING:
    from services.http.client import Origin
    from services.load.asking import Manner
    from services.load.running import LoadLimits
    from simulator.load_plan import Planned
    from simulator.load_report import RequestResult

SHOW_BAR_S = 2.0
MODELS_S = 10.0
NUM_REQUESTS = 100
RATE = 4.0
KEY_VARIABLES = ("BLOCK_BENCH_API_KEY", "OPENAI_API_KEY")


@click.command(context_settings={"auto_envvar_prefix": "BLOCK_BENCH"})
@click.argument("url", envvar="BLOCK_BENCH_URL")
@click.option(
    "--config",
    "-c",
    metavar="TOML",
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, path: use_file(context, path, "bench") if path else None,
    help="Settings: flags' names as keys, in a table [bench]. Flags and environment (BLOCK_BENCH_*) go first.",
)
@click.option("--model", default=None, help="Model to ask for; else the only one that the endpoint lists.")
@click.option("--endpoint", default="completions", show_default=True, help="completions or chat.")
@click.option(
    "--trace",
    metavar="FILE",
    default=None,
    help="Requests as `block replay` reads them, or in the format of Azure, Mooncake, BurstGPT, Vidur, LLMServingSim.",
)
@click.option("--num-requests", "-n", type=int, default=None, help=f"How many; a trace's all, else {NUM_REQUESTS}.")
@click.option("--warm-up", type=int, default=0, show_default=True, help="So many of them, the first, do not count.")
@click.option("--prompt-tokens", default="lognormal:128:1", show_default=True, help="128, uniform:16:512, …")
@click.option("--output-tokens", default="lognormal:128:0.8", show_default=True, help="… lognormal:MEDIAN:SPREAD, …")
@click.option("--arrivals", default=None, help="poisson, gamma, uniform or trace. [a trace's own, else poisson]")
@click.option("--rate", type=float, default=None, help=f"Requests per second on average. [default: {RATE:g}]")
@click.option("--cv", type=float, default=2.0, show_default=True, help="Of gamma's gaps: 1 is poisson, more is bursts.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="Times as fast as the trace.")
@click.option(
    "--time-scale",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds that pass at the endpoint in a second, as with engines of that --speed; all times here are its own.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, prompts and arrivals.")
@click.option("--prompt", default="token-ids", show_default=True, help="token-ids (exact) or words.")
@click.option(
    "--output",
    default="ignore-eos",
    show_default=True,
    help="How answers get their lengths: ignore-eos with max_tokens; header x-block-output-tokens; none: max_tokens.",
)
@click.option("--slo-ttft-ms", type=float, default=None, help="For goodput; the endpoint is told, too.")
@click.option("--slo-tpot-ms", type=float, default=None, help="For goodput; the endpoint is told, too.")
@click.option(
    "--header",
    "-H",
    multiple=True,
    metavar="NAME: VALUE",
    allow_from_autoenv=False,  # values with spaces
    help="With every request; repeatable.",
)
@click.option("--timeout-s", type=float, default=600.0, show_default=True, help="Longest wait, on the wall's clock.")
@click.option("--max-in-flight", type=int, default=1024, show_default=True, help="Most at a time; more have to wait.")
@click.option("--csv", metavar="FILE", default=None, help="A line per request.")
@click.option("--json", is_flag=True, help="One JSON object on standard output.")
def bench(url: str, **flags: Any) -> int:
    """Send requests to the OpenAI endpoint at URL when they are due, whatever became of those before.

    Lengths are drawn or come from a trace; so do arrival times. Latencies count from when a request was due. A key is
    taken from BLOCK_BENCH_API_KEY or OPENAI_API_KEY. The status is 1 where no request succeeds.
    """
    import uvloop

    from predictor.request import Slo
    from services.http.client import origin_of
    from services.load.asking import Manner, headers_from
    from services.load.running import LoadLimits
    from simulator.load_report import summary, table, write_csv

    origin = origin_of(url.rstrip("/").removesuffix("/v1"))
    slo = Slo(ttft_s=seconds(flags, "slo_ttft_ms"), tpot_s=seconds(flags, "slo_tpot_ms"))
    limits = LoadLimits(timeout_s=flags["timeout_s"], max_in_flight=flags["max_in_flight"])
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    manner = Manner(
        model=flags["model"] or "",
        endpoint=flags["endpoint"],
        prompt=flags["prompt"],
        output=flags["output"],
        headers=headers_from(flags["header"], key),
        slo=slo,
        seed=flags["seed"],
        time_scale=flags["time_scale"],
    )
    plan = plan_from(flags)
    warm_up = {planned.request_id for planned in plan[: flags["warm_up"]]}
    with opened(flags["csv"]) as out:
        results = uvloop.run(measured(plan, origin, manner, limits))
        results = [result for result in results if result.plan.request_id not in warm_up]
        if out is not None:
            write_csv(results, slo, out)
    total = {"url": url, "time_scale": manner.time_scale, "num_warm_up": len(warm_up), **summary(results, slo)}
    if flags["json"]:
        json.dump(total, sys.stdout)
        print()
    else:
        if manner.time_scale != 1:
            print(f"times are the endpoint's, whose seconds took {1 / manner.time_scale:g} s\n")
        print("\n".join(table(total)))
    return 0 if total["num_ok"] else 1


def plan_from(flags: dict[str, Any]) -> list[Planned]:
    """Draw or read what is to be sent."""
    import numpy as np

    from simulator.load_plan import Timing, by_arrival, planned, synthetic
    from simulator.traces import Trace, trace_from

    if flags["seed"] < 0:
        raise ValueError(f"seed: must be at least 0, not {flags['seed']}")
    generator = np.random.default_rng(flags["seed"])
    num, kind, rate = flags["num_requests"], flags["arrivals"], flags["rate"]
    if num is not None and num < 1:
        raise ValueError(f"num_requests: must be at least 1, not {num}")
    if flags["trace"] is None:
        drawn = synthetic(num or NUM_REQUESTS, flags["prompt_tokens"], flags["output_tokens"], generator)
        trace = Trace(requests=drawn, has_arrivals=False)
    else:
        trace = trace_from(flags["trace"])
    requests = by_arrival(trace.requests, num)
    if kind == "trace" and not trace.has_arrivals:
        raise ValueError("arrivals: there is no --trace that says when its requests came")
    if not 0 <= flags["warm_up"] < len(requests):
        raise ValueError(f"warm_up: must lie between 0 and {len(requests) - 1}, not {flags['warm_up']}")
    kind = kind or ("trace" if trace.has_arrivals and rate is None else "poisson")
    timing = Timing(kind=kind, rate=RATE if rate is None else rate, cv=flags["cv"], speed=flags["speed"])
    return planned(requests, timing, generator, block_tokens=trace.block_tokens)


async def measured(plan: Sequence[Planned], origin: Origin, manner: Manner, limits: LoadLimits) -> list[RequestResult]:
    """Send everything, with a bar for those who wait."""
    from dataclasses import replace

    from services.load.running import run_plan

    if not manner.model:
        manner = replace(manner, model=await only_model(origin, manner))
    with progress(len(plan), plan[-1].due_s / manner.time_scale) as ended:
        return await run_plan(plan, origin, manner, limits, ended)


async def only_model(origin: Origin, manner: Manner) -> str:
    """Ask the endpoint for its model, where there is no doubt."""
    from services.http.client import HttpClient

    client = HttpClient()
    authorization = [pair for pair in manner.headers if pair[0] == b"authorization"]
    try:
        status, body = await client.get(origin, b"/v1/models", within_s=MODELS_S, headers=authorization)
        names = [str(model["id"]) for model in json.loads(body)["data"]] if status == 200 else None
    except (ConnectionError, TimeoutError) as error:
        raise ValueError(f"url: {error}") from None
    except (ValueError, TypeError, LookupError):
        names = None
    finally:
        client.close()
    if names is None:
        raise ValueError(f"url: /v1/models answers with status {status} and no list; name a --model")
    if len(names) != 1:
        raise ValueError(f"model: name one of {', '.join(names)}" if names else "model: the endpoint lists none")
    return names[0]


@contextmanager
def progress(num: int, last_due_s: float) -> Iterator[Callable[[RequestResult], None]]:
    """Show how many have ended, on a terminal, where it takes a while."""
    if not sys.stderr.isatty() or last_due_s < SHOW_BAR_S:
        yield lambda _: None
        return
    with click.progressbar(length=num, label="requests", show_pos=True, file=sys.stderr) as bar:
        yield lambda _: bar.update(1)


@contextmanager
def opened(path: str | None) -> Iterator[Any]:
    """Open the file before the work, so that a bad name costs nothing."""
    if path is None:
        yield None
        return
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as out:
            yield out
    except OSError as error:
        raise ValueError(f"csv: {path} cannot be written: {error.strerror}") from None


def seconds(flags: dict[str, Any], name: str) -> float | None:
    """Read a target in milliseconds."""
    value = flags[name]
    if value is None:
        return None
    if not 0 < value < 1e9:
        raise ValueError(f"{name}: must be a time above 0, not {value}")
    return float(value) / 1000
