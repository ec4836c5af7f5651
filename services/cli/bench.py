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

if TYPE_CHECKING:
    from services.http_client import Origin
    from services.load.asking import Manner
    from services.load.plan import Planned
    from services.load.running import Limits, Result

SHOW_BAR_S = 2.0
MODELS_S = 10.0
NUM_REQUESTS = 100
RATE = 4.0
KEY_VARIABLES = ("BLOCK_BENCH_API_KEY", "OPENAI_API_KEY")


@click.command()
@click.argument("url")
@click.option("--model", default=None, help="Model to ask for; else the only one that the endpoint lists.")
@click.option("--endpoint", default="completions", show_default=True, help="completions or chat.")
@click.option("--trace", "trace_file", metavar="FILE", default=None, help="Requests as `block replay` reads them.")
@click.option("--num-requests", "-n", type=int, default=None, help=f"How many; a trace's all, else {NUM_REQUESTS}.")
@click.option("--warm-up", type=int, default=0, show_default=True, help="So many of them, the first, do not count.")
@click.option("--prompt-tokens", default="lognormal:128:1", show_default=True, help="128, uniform:16:512, …")
@click.option("--output-tokens", default="lognormal:128:0.8", show_default=True, help="… lognormal:MEDIAN:SPREAD, …")
@click.option("--arrivals", default=None, help="poisson, gamma, uniform or trace. [a trace's own, else poisson]")
@click.option("--rate", type=float, default=None, help=f"Requests per second on average. [default: {RATE:g}]")
@click.option("--cv", type=float, default=2.0, show_default=True, help="Of gamma's gaps: 1 is poisson, more is bursts.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="Times as fast as the trace.")
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
@click.option("--header", "-H", "header", multiple=True, metavar="NAME: VALUE", help="With every request; repeatable.")
@click.option("--timeout-s", type=float, default=600.0, show_default=True, help="Longest wait for an answer.")
@click.option("--max-in-flight", type=int, default=1024, show_default=True, help="Most at a time; more have to wait.")
@click.option("--csv", "csv_file", metavar="FILE", default=None, help="A line per request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def bench(url: str, csv_file: str | None, *, as_json: bool, **flags: Any) -> int:
    """Send requests to the OpenAI endpoint at URL when they are due, whatever became of those before.

    Lengths are drawn or come from a trace; so do arrival times. Latencies count from when a request was due. A key is
    taken from BLOCK_BENCH_API_KEY or OPENAI_API_KEY. The status is 1 where no request succeeds.
    """
    import uvloop

    from predictor.request import Slo
    from services.http_client import origin_of
    from services.load.asking import Manner, headers_from
    from services.load.report import summary, table, write_csv
    from services.load.running import Limits

    origin = origin_of(url.rstrip("/").removesuffix("/v1"))
    slo = Slo(ttft_s=seconds(flags, "slo_ttft_ms"), tpot_s=seconds(flags, "slo_tpot_ms"))
    limits = Limits(timeout_s=flags["timeout_s"], max_in_flight=flags["max_in_flight"])
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    manner = Manner(
        model=flags["model"] or "",
        endpoint=flags["endpoint"],
        prompt=flags["prompt"],
        output=flags["output"],
        headers=(*headers_from(flags["header"], key), *slo_headers(slo)),
        seed=flags["seed"],
    )
    plan = plan_from(flags)
    counted = plan[flags["warm_up"] :]
    with opened(csv_file) as out:
        results = uvloop.run(measured(plan, origin, manner, limits))
        warm_up = {planned.request_id for planned in plan[: flags["warm_up"]]}
        results = [result for result in results if result.plan.request_id not in warm_up]
        if out is not None:
            write_csv(results, slo, out)
    total = {"url": url, "num_warm_up": len(plan) - len(counted), **summary(results, slo)}
    if as_json:
        json.dump(total, sys.stdout)
        print()
    else:
        print("\n".join(table(total)))
    return 0 if total["num_ok"] else 1


def plan_from(flags: dict[str, Any]) -> list[Planned]:
    """Draw or read what is to be sent."""
    import numpy as np

    from services.codec import requests_from_file
    from services.load.plan import Timing, from_trace, planned, synthetic

    if flags["seed"] < 0:
        raise ValueError(f"seed: must be at least 0, not {flags['seed']}")
    generator = np.random.default_rng(flags["seed"])
    num, trace = flags["num_requests"], flags["trace_file"]
    if num is not None and num < 1:
        raise ValueError(f"num_requests: must be at least 1, not {num}")
    if trace is None:
        requests = synthetic(num or NUM_REQUESTS, flags["prompt_tokens"], flags["output_tokens"], generator)
    else:
        requests = from_trace(requests_from_file(trace, block_size=16), num)
    kind = flags["arrivals"] or ("poisson" if trace is None or flags["rate"] is not None else "trace")
    if kind == "trace" and trace is None:
        raise ValueError("arrivals: a trace's need --trace")
    if not 0 <= flags["warm_up"] < len(requests):
        raise ValueError(f"warm_up: must lie between 0 and {len(requests) - 1}, not {flags['warm_up']}")
    rate = flags["rate"] if flags["rate"] is not None or trace is not None else RATE
    return planned(requests, Timing(kind=kind, rate=rate, cv=flags["cv"], speed=flags["speed"]), generator)


async def measured(plan: Sequence[Planned], origin: Origin, manner: Manner, limits: Limits) -> list[Result]:
    """Send everything, with a bar for those who wait."""
    from dataclasses import replace

    from services.load.running import run_plan

    if not manner.model:
        manner = replace(manner, model=await only_model(origin, manner))
    with progress(len(plan), plan[-1].due_s) as ended:
        return await run_plan(plan, origin, manner, limits, ended)


async def only_model(origin: Origin, manner: Manner) -> str:
    """Ask the endpoint for its model, where there is no doubt."""
    from services.http_client import HttpClient

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
def progress(num: int, last_due_s: float) -> Iterator[Callable[[Result], None]]:
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


def slo_headers(slo: Any) -> Iterator[tuple[bytes, bytes]]:
    """Tell the endpoint what the run is measured by; a request's own targets come after and go first."""
    for name, value in ((b"x-slo-ttft-ms", slo.ttft_s), (b"x-slo-tpot-ms", slo.tpot_s)):
        if value is not None:
            yield name, b"%.3f" % (value * 1000)
