"""The accuracy of forecasts and decisions with real vLLM engines: predicted and measured latencies per request.

Two engines of vLLM's CPU build serve a small random model, each on its own core with one thread. Their profiles are
measured first, both at the same time, because they will run at the same time (`block profile measure`). Then requests
with ShareGPT's lengths, cut to fit, arrive as a Poisson process at the share `--load` of the engine model's capacity,
through a gateway and a scheduler that know the true lengths.

- `{mode}.{ttft|tpot|e2e}_error`: the error of the forecast in the reply's headers, against the client's latency from
  sending on; `median` is of the absolute relative error, `bias` of the signed one.
- `{mode}.spearman`: rank correlation of predicted and measured e2e, over the requests of both instances.
- `{mode}.best_instance_share`: of `--pairs` requests that are sent to both engines after the decision, the share that
  ended first on the chosen instance; `clear_best_share` that of requests whose two latencies differ by more than 5 %;
  `regret` is by how much longer all of them took on the chosen instance than on the better one, relative and in
  seconds, `regret_when_wrong` the median of those that did take longer.
- `{mode}.PART.{ttft|tpot|e2e}_error`: what the errors are made of, by windows of both engines (as `block observe`
  records them). PART `replay`: the engine model with all requests that arrived; `forecast_at_arrival`: with those that
  had arrived by then, corrected as schedulers do; `later_arrivals`: the latter against the former, which no profile can
  avoid; `measured_pace`: with steps as slow as the engine's, so that only arrival times and batching differ;
  `recalibrated`: with a profile recalibrated on the window. Times are the engine's.
- `{mode}.steps.{bias|error|noise|drift}`: of the step times. `--windows DIR` keeps the windows for `block accuracy`.

Mode `plugin` reads the state that the engines export; `mirror` is a proxy before engines that export nothing. The model
is narrow and deep, so that its steps have a large constant cost and a small cost per token, as on a GPU.

The two engines share memory and caches, and gateway, scheduler and this script run on the same cores, which forecasts
cannot know. `cpu_share` is the share of the machine's processor time by program; `others` are unrelated processes: if
they use more than a few per cent, the results depend mostly on them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.profile import profile_to_json
from scripts.broadcasting import Both, broadcast, choices
from scripts.cpu_engines import (
    ANSWER_LOG,
    HOST,
    MODEL,
    MOST_ANSWER,
    MOST_PROMPT,
    PROMPT_LOG,
    SEATS,
    STEP_TOKENS,
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
from scripts.engine_windows import errors_by_part, keep, observing
from scripts.forecast_errors import forecast_errors, forecast_requests, predicted_and_actual
from scripts.report import machine, row
from services.cluster.child import Child
from services.http.origin import Origin, origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from services.profiling.measure_command import run_engine
from simulator.load_plan import Planned
from simulator.load_report import RequestResult
from tests.deploy.engines import narrow_and_deep, repeating_weights, tiny_model

MODES = ("plugin", "mirror")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--load", type=float, default=0.85, help="share of what the engines can serve")
    parser.add_argument("--rate", type=float, help="requests per second, instead of --load")
    parser.add_argument("--pairs", type=int, default=60, help="requests that are sent to both, among the others")
    parser.add_argument("--windows", metavar="DIR", help="folder in which a window of each engine is kept")
    parser.add_argument("--budget", default="150s", help="time to measure the profiles")
    parser.add_argument("--profiles", metavar="DIR", help="folder in which profiles are kept")
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine-flags", default="", help="more flags of the engines, such as --speculative-config=…")
    parser.add_argument(
        "--repeating", type=float, metavar="SHARE", help="weights with which this share of tokens follows a cycle"
    )
    parser.add_argument("--vllm", default=os.environ.get("BLOCK_VLLM_PYTHON", str(VLLM)), help="Python that has vLLM")
    parser.add_argument("--records", metavar="FILE", help="a JSON line for each request")
    arguments = parser.parse_args()
    if not Path(arguments.vllm).exists():
        sys.exit(f"accuracy_vllm: there is no vLLM at {arguments.vllm}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    configure("warning", "text")
    with tempfile.TemporaryDirectory() as folder:
        results = uvloop.run(measure(arguments, Path(folder)))
    if arguments.json:
        report = {"bench": "accuracy_vllm", "machine": machine(), "settings": vars(arguments), "results": results}
        print(json.dumps(report))
        return
    for one in results:
        print(f"{one['name']:40} {one['value']:12.4f} {one['unit']:9} n={one['n']}")


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the engines, measure their profiles, and send the load in each mode."""
    model = tiny_model(folder / "model", **narrow_and_deep(arguments.hidden, arguments.layers))
    if arguments.repeating is not None:
        repeating_weights(model, arguments.seed, arguments.repeating)
    results: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        progress("starting engines")
        starting = [
            stack.enter_async_context(run_engine(command, str(folder / f"{name}.state"), WITHIN_S))
            for name, command in commands(arguments, model)
        ]
        engines = await asyncio.gather(*starting)
        progress("measuring profiles")
        names = [f"vllm-{number}" for number in range(arguments.instances)]
        instances = await profiled(names, engines, arguments, measured)
        for one in instances:
            if one.profile.error is not None:
                results.append(row(f"profile_error.{one.name}", one.profile.error.p50, "ratio", one.profile.error.n))
            for name, value in asdict(one.profile.transit).items():
                results.append(row(f"transit.{name.removesuffix('_s')}_ms.{one.name}", 1000 * value, "ms", 1))
        plan = plan_of(arguments, instances)
        results.append(row("rate", (len(plan) - 1) / plan[-1].due_s, "requests/s", len(plan)))
        for number, mode in enumerate(MODES):
            if arguments.mode in (mode, "both"):
                progress(f"{mode}: {len(plan)} requests in about {plan[-1].due_s:.0f} s")
                results += await loaded(mode, plan, instances, folder, arguments, seed=10 * arguments.seed + number)
    return results


def commands(arguments: argparse.Namespace, model: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of the engines, and the commands that start them."""
    for number in range(arguments.instances):
        yield f"vllm-{number}", serve_command(arguments, model, number, flags=arguments.engine_flags)


def plan_of(arguments: argparse.Namespace, instances: Sequence[VllmInstance]) -> list[Planned]:
    """Draw lengths and arrivals."""
    generator = np.random.default_rng(arguments.seed)
    prompts = lengths(generator, PROMPT_LOG, MOST_PROMPT, arguments.requests)
    answers = lengths(generator, ANSWER_LOG, MOST_ANSWER, arguments.requests)
    sent = 1 + arguments.pairs * (len(instances) - 1) / arguments.requests  # engines that a request is sent to
    rate = arguments.rate or arguments.load * sum(capacity(one, prompts, answers) for one in instances) / sent
    return planned(prompts, answers, rate, generator)


async def loaded(
    mode: str, plan: Sequence[Planned], instances: Sequence[VllmInstance], folder: Path, arguments: argparse.Namespace,
    *, seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Start the other programs, send the load, and return the results."""
    generator = np.random.default_rng(seed)
    chosen = set(generator.choice(len(plan), min(arguments.pairs, len(plan) // 2), replace=False).tolist())
    sampled = [one for number, one in enumerate(plan) if number in chosen]
    others = [one for number, one in enumerate(plan) if number not in chosen]
    form = RequestFormat(model=MODEL, seed=seed)  # other prompts than before, so that none is cached
    limits = LoadLimits(timeout_s=WITHIN_S)
    children: list[Child] = []
    try:
        urls, scheduler, gateway = await front_of(mode, instances, folder, children)
        await warmed_up(gateway, form, limits, len(instances))
        used, start_s = processor_times(children, instances), time.monotonic()
        async with observing({one.name: (one.engine.state_file, one.profile) for one in instances}) as observed:
            results, both = await asyncio.gather(
                run_plan(others, gateway, form, limits, lambda _: None),
                broadcast(sampled, scheduler, urls, form, limits),
            )
        wall_s = time.monotonic() - start_s
        used = {kind: seconds - used.get(kind, 0.0) for kind, seconds in processor_times(children, instances).items()}
    finally:
        for child in reversed(children):
            await child.stop()
    if arguments.records:
        record(arguments.records, mode, results)
    if arguments.windows:
        keep(Path(arguments.windows), mode, observed)
    rows = summed_up(results, both) + errors_by_part(observed)
    rows += [
        row(f"cpu_share.{kind}", seconds / wall_s / (os.cpu_count() or 1), "of all", 1)
        for kind, seconds in used.items()
    ]
    return [{**one, "name": f"{mode}.{one['name']}"} for one in rows]


async def warmed_up(gateway: Origin, form: RequestFormat, limits: LoadLimits, num_instances: int) -> None:
    """Send a few requests that do not count, until all instances have served some."""
    plan = [
        Planned(request_id=f"w{number}", due_s=0.1 * number, prompt_tokens=8, output_tokens=WARM_UP_TOKENS)
        for number in range(WARM_UP)
    ]
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        results = await run_plan(plan, gateway, form, limits, lambda _: None)
        if len({one.instance for one in results if one.failure is None}) == num_instances:
            return
        if time.monotonic() > deadline_s:
            sys.exit("accuracy_vllm: not all instances serve")


async def front_of(
    mode: str, instances: Sequence[VllmInstance], folder: Path, children: list[Child]
) -> tuple[dict[str, str], str, Origin]:
    """Start sidecars, a tagger, a scheduler and a gateway; yield the URLs of engines, scheduler and gateway."""

    async def start(name: str, *words: str, proxy: bool = False) -> Child:
        children.append(Child(name, *words, proxy_port=0 if proxy else None))
        await children[-1].start()
        return children[-1]

    urls, listed = {}, []
    for one in instances:
        profile = folder / f"{one.name}.json"
        profile.write_text(profile_to_json(one.profile))
        words = ["predictor", "--instance-id", one.name, "--engine-url", one.engine.url, "--profile", str(profile)]
        words += ["--stall-s", "30"]
        if mode == "plugin":
            words += ["--state-file", one.engine.state_file]
        else:
            words += ["--max-num-seqs", str(SEATS), "--max-num-batched-tokens", str(STEP_TOKENS)]
        sidecar = await start(f"predictor-{one.name}", *words, proxy=mode == "mirror")
        urls[one.name] = one.engine.url if mode == "plugin" else f"http://{HOST}:{sidecar.proxy_port}"
        listed += ["--instance", f"{one.name}={urls[one.name]},{HOST}:{sidecar.port}"]
    tagger = await start("tagger", "tagger")
    scheduler = await start(
        "scheduler", "scheduler", *listed, "--tagger", f"{HOST}:{tagger.port}", "--sidecar-deadline-ms", "1000",
        "--tagger-deadline-ms", "200",
    )  # fmt: skip
    gateway = await start("gateway", "gateway", "--scheduler", f"{HOST}:{scheduler.port}", "--schedule-s", "10")
    return urls, f"{HOST}:{scheduler.port}", origin_of(f"http://{HOST}:{gateway.port}")


def summed_up(results: Sequence[RequestResult], both: Sequence[Both]) -> list[dict[str, Any]]:
    """Return the results of one mode."""
    good = forecast_requests(results)
    rows = forecast_errors(results, shares=(50, 99))
    pairs = [pair for one in good if (pair := predicted_and_actual(one, "e2e")) is not None]
    rows.append(row("spearman", float(spearmanr(*zip(*pairs, strict=True)).statistic), "ratio", len(pairs)))
    if both:
        rows += choices(both)
    decided = [1000 * one.decision_s for one in good if one.decision_s is not None]
    rows.append(row("decision_ms.p50", statistics.median(decided), "ms", len(decided)))
    rows.append(row("sent_late_ms.p99", 1000 * float(np.percentile([one.sent_s for one in good], 99)), "ms", len(good)))
    return rows


def record(path: str, mode: str, results: Sequence[RequestResult]) -> None:
    """Write one line per request."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"mode": mode, **asdict(one)}) + "\n" for one in results)


def processor_times(children: Sequence[Child], instances: Sequence[VllmInstance]) -> dict[str, float]:
    """Return the processor seconds so far: of each program, of this process, and of all other processes."""
    kinds = {child.pid: child.name.partition("-")[0] for child in children}
    kinds |= {one.engine.pid: "engines" for one in instances}
    used = dict.fromkeys(kinds.values(), 0.0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the process has just ended
        if (kind := kinds.get(int(fields[3]))) is not None:  # each program leads its own session
            used[kind] += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    used["load"] = time.process_time()
    busy = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    used["others"] = (sum(map(int, busy)) - int(busy[3]) - int(busy[4])) / TICKS_PER_S - sum(used.values())
    return used


if __name__ == "__main__":
    main()
