"""The accuracy of forecasts of two legs: real vLLM engines with NIXL, one that prefills and one that decodes.

Both run vLLM's CPU build with a small random model, each on its own core with one thread. Their profiles and the
transfers between them are measured first (`block profile measure`, `block profile transfer`). Then requests arrive as a
Poisson process through a gateway that decides in its own process and knows the true lengths; every request is sent in
two legs. The share `--load` is of what the busier of the two engines can serve by the engine model.

- `{ttft|tpot|e2e}_error`: the error of the forecast in the reply's headers, made at the decision, against the client's
  latency from sending on; `median` is of the absolute relative error, `bias` of the signed one.
- `hand_over_ms`: from the reply to the prefill leg to the request to the decode engine, in the gateway.
- `prefill_leg_ms`: from sending the prefill leg to its reply.
- `legs`: requests in two legs; `failed_requests`: requests without a whole response or a forecast.

Gateway, sidecars, the engines' front ends and this script run on the same cores as the engines, which forecasts cannot
know: keep the load low on a small machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.profile import Profile, profile_to_json
from scripts.cpu_engines import (
    ANSWER_LOG,
    HOST,
    MODEL,
    MOST_ANSWER,
    MOST_PROMPT,
    PROMPT_LOG,
    VLLM,
    WARM_UP,
    WARM_UP_TOKENS,
    WITHIN_S,
    VllmInstance,
    capacity,
    lengths,
    measured,
    planned,
    profiled,
    progress,
    serve_command,
)
from scripts.forecast_errors import forecast_errors
from scripts.report import report, row
from services.cluster.child import Child
from services.cluster.engines import free_port
from services.cluster.pools import connector_environment, connector_flags, planned_engines
from services.http.client import HttpClient
from services.http.origin import Origin, origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from services.profiling.measure_command import EngineProcess, run_engine
from services.profiling.transfers import TransferOptions, measured_transfers
from services.settings import seconds_of
from simulator.load_plan import Planned
from tests.deploy.engines import narrow_and_deep, tiny_model
from tests.deploy.installing import PLUGIN, pip_install

PLANNED = planned_engines(1, 1, 0)
POLICY = 'block: disaggregate = "always"'


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--load", type=float, default=0.3, help="share of what the busier engine can serve")
    parser.add_argument("--rate", type=float, help="requests per second, instead of --load")
    parser.add_argument("--budget", default="90s", help="time to measure the profiles")
    parser.add_argument("--transfer-budget", default="30s", help="time to measure transfers")
    parser.add_argument("--profiles", metavar="DIR", help="folder in which profiles are kept")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm", default=os.environ.get("BLOCK_VLLM_PYTHON", str(VLLM)), help="Python that has vLLM")
    arguments = parser.parse_args()
    if not Path(arguments.vllm).exists():
        sys.exit(f"accuracy_disaggregation: there is no vLLM at {arguments.vllm}: `make vllm`, or BLOCK_VLLM_PYTHON")
    configure("warning", "text")
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(measure(arguments, Path(folder)))
    report("accuracy_disaggregation", results, as_json=arguments.json, settings=vars(arguments))


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the engines, measure their profiles and transfers, and send the load."""
    model = tiny_model(folder / "model", **narrow_and_deep(arguments.hidden, arguments.layers))
    pip_install(PLUGIN, folder / "site")
    async with AsyncExitStack() as stack:
        progress("starting engines")
        starting = [
            stack.enter_async_context(run_engine(command, str(folder / f"{name}.state"), WITHIN_S))
            for name, command in commands(arguments, model, folder / "site")
        ]
        engines = await asyncio.gather(*starting)
        progress("measuring profiles and transfers")
        names = [engine.name for engine in PLANNED]
        pools = await profiled(names, engines, arguments, measured_with_transfers)
        results = [
            row(f"profile_error.{one.name}", one.profile.error.p50, "ratio", one.profile.error.n)
            for one in pools
            if one.profile.error is not None
        ]
        transfer = pools[0].profile.transfer
        results.append(row("transfer.base_ms", 1000 * (transfer.kv_transfer_base_s or 0.0), "ms", 1))
        results.append(row("transfer.gb_per_s", (transfer.kv_transfer_bytes_per_s or 0.0) / 1e9, "GB/s", 1))
        plan = plan_of(arguments, pools)
        results.append(row("rate", (len(plan) - 1) / plan[-1].due_s, "requests/s", len(plan)))
        progress(f"{len(plan)} requests in about {plan[-1].due_s:.0f} s")
        return results + await loaded(plan, pools, folder, arguments)


def commands(arguments: argparse.Namespace, model: Path, site: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of the engines, and the commands that start them."""
    for number, engine in enumerate(PLANNED):
        variables = connector_environment(engine, HOST, free_port(HOST), {}, on_cpu=True)
        flag, connector = connector_flags(engine, (), on_cpu=True)
        variables["PYTHONPATH"] = str(site)
        yield engine.name, serve_command(arguments, model, number, variables, f"{flag} '{connector}'")


async def measured_with_transfers(engines: Sequence[EngineProcess], arguments: argparse.Namespace) -> list[Profile]:
    """Measure the profiles, and the transfers between the engines."""
    made = await measured(engines, arguments)
    options = TransferOptions(
        prefill_url=engines[0].url,
        decode_url=engines[1].url,
        budget_s=seconds_of(arguments.transfer_budget, "transfer_budget"),
    )
    transfers = await measured_transfers(options, lambda _: None)
    return [replace(one, transfer=transfers.fitted.time) for one in made]


def plan_of(arguments: argparse.Namespace, pools: Sequence[VllmInstance]) -> list[Planned]:
    """Draw lengths and arrivals."""
    generator = np.random.default_rng(arguments.seed)
    prompts = lengths(generator, PROMPT_LOG, MOST_PROMPT, arguments.requests)
    answers = lengths(generator, ANSWER_LOG, MOST_ANSWER, arguments.requests)
    prefill, decode = pools
    busiest = min(capacity(prefill, prompts, [1] * len(prompts)), capacity(decode, [1] * len(prompts), answers))
    return planned(prompts, answers, arguments.rate or arguments.load * busiest, generator)


async def loaded(
    plan: Sequence[Planned], pools: Sequence[VllmInstance], folder: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Start the other programs, send the load, and return the results."""
    form = RequestFormat(model=MODEL, seed=arguments.seed)
    limits = LoadLimits(timeout_s=WITHIN_S)
    children: list[Child] = []
    try:
        gateway = await front_of(pools, folder, children)
        await warmed_up(gateway, form, limits)
        before = await metrics_of(gateway)
        results = await run_plan(plan, gateway, form, limits, lambda _: None)
        after = await metrics_of(gateway)
    finally:
        for child in reversed(children):
            await child.stop()
    return [*forecast_errors(results, shares=(50,)), *timed_legs(before, after)]


async def front_of(pools: Sequence[VllmInstance], folder: Path, children: list[Child]) -> Origin:
    """Start sidecars, a tagger and a gateway that decides itself; return the gateway's origin."""

    async def start(name: str, *words: str) -> Child:
        children.append(Child(name, *words))
        await children[-1].start()
        return children[-1]

    listed = []
    for one, engine in zip(pools, PLANNED, strict=True):
        profile = folder / f"{one.name}.json"
        profile.write_text(profile_to_json(one.profile))
        sidecar = await start(
            f"predictor-{one.name}", "predictor", "--instance-id", one.name, "--engine-url", one.engine.url,
            "--profile", str(profile), "--stall-s", "30", "--state-file", one.engine.state_file,
        )  # fmt: skip
        address = f"{HOST}:{sidecar.port}"
        listed.append(
            {"instance_id": one.name, "engine_url": one.engine.url, "sidecar_address": address, "role": engine.role}
        )
    instances = folder / "instances.json"
    instances.write_text(json.dumps({"instances": listed}))
    tagger = await start("tagger", "tagger")
    gateway = await start(
        "gateway", "gateway", "--decide", "in-process", "--policy", POLICY, "--instances-file", str(instances),
        "--tagger", f"{HOST}:{tagger.port}", "--sidecar-deadline-ms", "1000", "--tagger-deadline-ms", "200",
        "--schedule-s", "10",
    )  # fmt: skip
    return origin_of(f"http://{HOST}:{gateway.port}")


async def warmed_up(gateway: Origin, form: RequestFormat, limits: LoadLimits) -> None:
    """Send a few requests that do not count, until all have two legs."""
    plan = [
        Planned(request_id=f"w{number}", due_s=0.2 * number, prompt_tokens=100, output_tokens=WARM_UP_TOKENS)
        for number in range(WARM_UP)
    ]
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        before = legs_in(await metrics_of(gateway))
        results = await run_plan(plan, gateway, form, limits, lambda _: None)
        after = legs_in(await metrics_of(gateway))
        if after - before == len(plan) and all(one.failure is None for one in results):
            return
        if time.monotonic() > deadline_s:
            sys.exit("accuracy_disaggregation: requests are not served in two legs")


async def metrics_of(gateway: Origin) -> dict[tuple[str, str], float]:
    """Read the gateway's metrics of legs: samples by name and by bucket or result."""
    client = HttpClient()
    try:
        _, body = await client.get(gateway, b"/metrics", within_s=WITHIN_S, max_bytes=2**24)
    finally:
        client.close()
    return {
        (sample.name, sample.labels.get("le") or sample.labels.get("result", "")): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith(("block_gateway_prefill", "block_gateway_hand_over"))
    }


def legs_in(samples: dict[tuple[str, str], float]) -> float:
    """Return the number of prefill legs whose blocks a decode engine could fetch."""
    return samples.get(("block_gateway_prefill_legs_total", "held"), 0.0)


def timed_legs(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> Iterator[dict[str, Any]]:
    """Yield the number of requests in two legs, and medians from the gateway's histograms."""
    counted = {key: value - before.get(key, 0.0) for key, value in after.items()}
    yield row("legs", legs_in(counted), "requests", 1)
    for name, metric in (
        ("hand_over", "block_gateway_hand_over_seconds"),
        ("prefill_leg", "block_gateway_prefill_seconds"),
    ):
        buckets = sorted((float(key[1]), value) for key, value in counted.items() if key[0] == f"{metric}_bucket")
        num = buckets[-1][1] if buckets else 0.0
        if num:
            yield row(f"{name}_ms.p50", 1000 * median_of(buckets), "ms", int(num))


def median_of(buckets: Sequence[tuple[float, float]]) -> float:
    """Return the median by a histogram's buckets, each its upper limit and the number of values up to it."""
    wanted, low, below = buckets[-1][1] / 2, 0.0, 0.0
    for high, count in buckets:
        if count >= wanted:
            share = (wanted - below) / (count - below)
            return low + share * (high - low) if np.isfinite(high) else low
        low, below = high, count
    raise AssertionError("the last bucket has all values")


if __name__ == "__main__":
    main()
