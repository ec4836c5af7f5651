"""`block bench`: sends load to an OpenAI endpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.output_files import require_folder
from services.cli.progress_bars import bar
from services.cli.settings_options import SettingValues, settings_options
from services.cli.tls_options import tls_options
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits
from services.load.settings import DEFAULT_RATE, DEFAULT_REQUESTS, BenchSettings
from services.settings import CommandSettings

if TYPE_CHECKING:
    from services.http.origin import Origin
    from simulator.load_plan import Planned
    from simulator.load_report import RequestResult
    from simulator.mix import MixEntry

MODELS_S = 10.0
KEY_VARIABLES = ("BLOCK_BENCH_API_KEY", "OPENAI_API_KEY")
SETTINGS = CommandSettings("bench", BenchSettings, RequestFormat, LoadLimits, environment=("BLOCK_BENCH",))


@click.command()
@click.argument("url", envvar="BLOCK_BENCH_URL")
@tls_options
@settings_options(SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(given: SettingValues, url: str, *, as_json: bool) -> int:
    """Send requests to the OpenAI endpoint at URL when they are due, independent of earlier responses.

    Lengths and arrival times are drawn, or come from a trace. Latencies count from the time at which a request was due.
    An API key is read from BLOCK_BENCH_API_KEY or OPENAI_API_KEY. The exit status is 1 if no request succeeds.
    """
    import uvloop

    from predictor.request import Slo
    from services.cli.mix_options import gain_weights
    from services.http.origin import origin_of
    from services.load.request_format import headers_from
    from services.result_files import require_writable, write_page
    from simulator.load_report import summary, table, write_csv
    from simulator.run_page import run_of_load

    origin = origin_of(url.rstrip("/").removesuffix("/v1"))
    settings = given.make(BenchSettings)
    slo = Slo(ttft_s=seconds("slo_ttft_ms", settings.slo_ttft_ms), tpot_s=seconds("slo_tpot_ms", settings.slo_tpot_ms))
    weights = gain_weights(settings.priority_weight, settings.first_token_weight)
    limits = given.make(LoadLimits)
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    form = given.make(RequestFormat, model=settings.model, headers=headers_from(settings.header, key), slo=slo)
    plan = plan_from(settings, form.seed)
    require_folder(settings.window or None)
    warm_up = {planned.request_id for planned in plan[: settings.warm_up]}
    if settings.html:
        require_writable("html", settings.html)
    with opened(settings.csv) as out:
        results = uvloop.run(measured(plan, origin, form, limits))
        if settings.window:
            write_windows(results, Path(settings.window), origin, form, warm_up)
        results = [result for result in results if result.plan.request_id not in warm_up]
        if out is not None:
            write_csv(results, slo, out)
    total = {"url": url, "time_scale": form.time_scale, "num_warm_up": len(warm_up), **summary(results, slo, weights)}
    if settings.html:
        write_page(settings.html, f"Load on {url}", [run_of_load(url, results, list(table(total)))])
    if as_json:
        json.dump(total, sys.stdout)
        print()
    else:
        if form.time_scale != 1:
            print(f"times are the endpoint's: one of its seconds takes {1 / form.time_scale:g} s\n")
        print("\n".join(table(total)))
    return 0 if total["num_ok"] else 1


def plan_from(settings: BenchSettings, seed: int) -> list[Planned]:
    """Draw or read the requests and their times."""
    from dataclasses import replace

    import numpy as np

    from scheduler.objectives import NO_OBJECTIVES, objectives_in
    from simulator.codec import read_text
    from simulator.load_plan import Timing, by_arrival, planned, synthetic
    from simulator.mix import mix_from_file, mixed, require_objectives
    from simulator.traces import Trace, trace_from

    if seed < 0:
        raise ValueError(f"seed: must be at least 0, not {seed}")
    generator = np.random.default_rng(seed)
    num, kind, rate = settings.num_requests, settings.arrivals, settings.rate
    if num is not None and num < 1:
        raise ValueError(f"num_requests: must be at least 1, not {num}")
    if settings.trace:
        trace = trace_from(settings.trace)
    else:
        drawn = synthetic(num or DEFAULT_REQUESTS, settings.prompt_tokens, settings.output_tokens, generator)
        trace = Trace(requests=drawn, has_arrivals=False)
    requests = by_arrival(trace.requests, num)
    if kind == "trace" and not trace.has_arrivals:
        raise ValueError("arrivals: trace needs a --trace with arrival times")
    if not 0 <= settings.warm_up < len(requests):
        raise ValueError(f"warm_up: must lie between 0 and {len(requests) - 1}, not {settings.warm_up}")
    kind = kind or ("trace" if trace.has_arrivals and rate is None else "poisson")
    timing = Timing(kind=kind, rate=DEFAULT_RATE if rate is None else rate, cv=settings.cv, speed=settings.speed)
    entries: list[MixEntry] | None = None
    stated = None
    if settings.objectives and not settings.mix:
        raise ValueError("objectives: needs a --mix whose entries name them")
    if settings.mix:
        mix, objectives = mix_from_file(settings.mix), NO_OBJECTIVES
        if settings.objectives:
            objectives = objectives_in(read_text(settings.objectives), settings.objectives)
            require_objectives(mix, objectives)
        stated, entries = mixed(requests, mix, seed)
        requests, _ = mixed(requests, mix, seed, objectives)
    for tenant in {request.client_id for request in requests}:
        if not (tenant.isascii() and tenant.isprintable()):
            raise ValueError(f"tenant: must be printable ASCII, as it is sent in a header, not {tenant!r}")
    plan = planned(requests, timing, generator, block_tokens=trace.block_tokens, mix_entries=entries)
    return [replace(one, stated=said) for one, said in zip(plan, stated, strict=True)] if stated else plan


async def measured(
    plan: Sequence[Planned], origin: Origin, form: RequestFormat, limits: LoadLimits
) -> list[RequestResult]:
    """Send all requests; on a terminal a bar shows the progress."""
    from dataclasses import replace

    from services.load.running import run_plan

    if not form.model:
        form = replace(form, model=await only_model(origin, form))
    with progress(len(plan)) as ended:
        return await run_plan(plan, origin, form, limits, ended)


async def only_model(origin: Origin, form: RequestFormat) -> str:
    """Get the endpoint's model, if it lists exactly one."""
    from services.http.client import HttpClient

    client = HttpClient()
    authorization = [pair for pair in form.headers if pair[0] == b"authorization"]
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


def write_windows(
    results: Sequence[RequestResult], path: Path, origin: Origin, form: RequestFormat, warm_up: Collection[str]
) -> None:
    """Write a window of each instance that has answered; it begins after the requests to warm up."""
    from dataclasses import replace

    import uvloop

    from predictor.config import EngineConfig
    from services.observing.observing import reported_settings
    from services.observing.traffic import sent_requests, window_of_client
    from services.observing.window_writing import write_window

    reported, model = uvloop.run(reported_settings(origin))
    begin_s = min(one.plan.due_s + one.sent_s for one in results if one.plan.request_id not in warm_up)
    instances = sorted({result.instance for result in results})
    for instance in instances:
        requests = sent_requests([result for result in results if result.instance == instance])
        window = window_of_client(
            requests,
            EngineConfig(**reported),
            end_s=max([begin_s, *(one.last_token_s or 0.0 for one in requests)]),
            profile="",
            instance=instance,
            model=form.model or model,
            source="block bench",
            clock_rate=form.time_scale,
        )
        window = replace(window, header=replace(window.header, begin_s=begin_s))
        file = path if len(instances) == 1 else path.with_name(f"{path.stem}.{instance or 'unnamed'}{path.suffix}")
        write_window(window, file)


@contextmanager
def progress(num: int) -> Iterator[Callable[[RequestResult], None]]:
    """Count the results of requests in a bar."""
    with bar(num, "requests") as at:
        done = count(1)
        yield lambda _: at(next(done))


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open the file before the run, so that a bad path fails early."""
    if not path:
        yield None
        return
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as out:
            yield out
    except OSError as error:
        raise ValueError(f"csv: {path} cannot be written: {error.strerror}") from None


def seconds(name: str, milliseconds: float | None) -> float | None:
    """Convert a target from milliseconds."""
    if milliseconds is None:
        return None
    if not 0 < milliseconds < 1e9:
        raise ValueError(f"{name}: must be a time above 0, not {milliseconds}")
    return milliseconds / 1000
