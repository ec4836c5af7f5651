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
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).parents[1]))

from predictor.profile import Profile, profile_from_json, profile_to_json
from predictor.request import RequestFacts
from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.engine_windows import errors_by_part, keep, observing, row
from services.cluster.child import Child
from services.cluster.engines import free_port
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of
from services.http.client import Origin, origin_of
from services.load.request_format import RequestFormat, body_of
from services.load.running import LoadLimits, LoadSender, run_plan
from services.logs import configure
from services.profiling.measure_command import EngineProcess, MeasureOptions, measured_profile, run_engine
from services.settings import seconds_of
from simulator.load_plan import Planned, Timing, arrival_times
from simulator.load_report import RequestResult
from simulator.replay import replay
from tests.deploy.engines import narrow_and_deep, repeating_weights, tiny_model

MODEL = "tiny"
HOST = "127.0.0.1"
MODES = ("plugin", "mirror")
VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
LONGEST, BLOCK_SIZE, NUM_BLOCKS, SEATS, STEP_TOKENS = 1024, 32, 320, 16, 512
# ShareGPT v3: mean and standard deviation of the logarithm, cut to lengths that these engines serve within seconds
PROMPT_LOG, MOST_PROMPT = (3.98, 1.67), 600
ANSWER_LOG, MOST_ANSWER = (5.37, 1.10), 256
CLEAR = 0.05  # by which two latencies differ clearly
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WITHIN_S = 600.0
WARM_UP, WARM_UP_TOKENS = 8, 64  # replaces step-time corrections that were learnt during the start
NO_VARIABLES: Mapping[str, str] = {}

Measuring = Callable[[Sequence[EngineProcess], argparse.Namespace], Awaitable[list[Profile]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInstance:
    """One engine with its profile."""

    name: str
    engine: EngineProcess
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """A request that was sent to all engines: the chosen instance, and the latency on each."""

    chosen: str
    e2e_s: dict[str, float]


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


def serve_command(
    arguments: argparse.Namespace,
    model: Path,
    number: int,
    variables: Mapping[str, str] = NO_VARIABLES,
    flags: str = "",
) -> str:
    """Return the command that starts an engine: one thread, on a core of its own."""
    vllm = Path(arguments.vllm).with_name("vllm")
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables,
    }  # fmt: skip
    return (
        f"env {' '.join(f'{name}={value}' for name, value in environment.items())}"
        f" taskset -c {cores[number % len(cores)]}"
        f" {vllm} serve {model} --served-model-name {MODEL} --enforce-eager"
        f" --load-format {'dummy' if getattr(arguments, 'repeating', None) is None else 'auto'}"
        f" --max-model-len {LONGEST} --block-size {BLOCK_SIZE} --num-gpu-blocks-override {NUM_BLOCKS + 1}"
        f" --max-num-seqs {SEATS} --max-num-batched-tokens {STEP_TOKENS} --disable-uvicorn-access-log"
        f" --host {HOST} --port {free_port(HOST)} {flags}"
    )


async def profiled(
    names: Sequence[str], engines: Sequence[EngineProcess], arguments: argparse.Namespace, measuring: Measuring
) -> list[VllmInstance]:
    """Return the engines with profiles: kept ones, or new ones."""
    kept = None if arguments.profiles is None else Path(arguments.profiles)
    files = [] if kept is None else [kept / f"{name}.json" for name in names]
    if files and all(file.exists() for file in files):
        made = [profile_from_json(file.read_text(encoding="utf-8")) for file in files]
    else:
        made = await measuring(engines, arguments)
        for file, profile in zip(files, made, strict=False):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(profile_to_json(profile), encoding="utf-8")
    return [
        VllmInstance(name=name, engine=engine, profile=profile)
        for name, engine, profile in zip(names, engines, made, strict=True)
    ]


async def measured(engines: Sequence[EngineProcess], arguments: argparse.Namespace) -> list[Profile]:
    """Measure all engines at the same time, as `block profile measure` does."""
    options = [
        MeasureOptions(
            engine_url=engine.url,
            state_file=engine.state_file,
            budget_s=seconds_of(arguments.budget, "budget"),
            name=f"measured-{number}",
            gpu="CPU",
            seed=number,
        )
        for number, engine in enumerate(engines)
    ]
    made = await asyncio.gather(*(measured_profile(one, lambda _: None) for one in options))
    return [profile for profile, _ in made]


def plan_of(arguments: argparse.Namespace, instances: Sequence[VllmInstance]) -> list[Planned]:
    """Draw lengths and arrivals."""
    generator = np.random.default_rng(arguments.seed)
    prompts = lengths(generator, PROMPT_LOG, MOST_PROMPT, arguments.requests)
    answers = lengths(generator, ANSWER_LOG, MOST_ANSWER, arguments.requests)
    sent = 1 + arguments.pairs * (len(instances) - 1) / arguments.requests  # engines that a request is sent to
    rate = arguments.rate or arguments.load * sum(capacity(one, prompts, answers) for one in instances) / sent
    return planned(prompts, answers, rate, generator)


def planned(
    prompts: Sequence[int], answers: Sequence[int], rate: float, generator: np.random.Generator
) -> list[Planned]:
    """Draw arrivals for requests of these lengths."""
    due_s = arrival_times(len(prompts), Timing(kind="poisson", rate=rate), generator)
    return [
        Planned(request_id=str(number), due_s=due, prompt_tokens=prompt, output_tokens=answer)
        for number, (due, prompt, answer) in enumerate(zip(due_s, prompts, answers, strict=True))
    ]


def lengths(generator: np.random.Generator, law: tuple[float, float], limit: int, num: int) -> list[int]:
    """Draw log-normal lengths of at most `limit`; longer ones are drawn again."""
    drawn: list[int] = []
    while len(drawn) < num:
        length = round(float(generator.lognormal(*law)))
        if 2 <= length <= limit:
            drawn.append(length)
    return drawn


def capacity(instance: VllmInstance, prompts: Sequence[int], answers: Sequence[int]) -> float:
    """Return the requests per second that the engine model serves if all arrive at the beginning."""
    requests = [
        RequestFacts(request_id=str(number), prompt_tokens=prompt, output_tokens=answer)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    reader = Reader(instance.engine.state_file)
    try:
        config = replace(config_of(reader.read()), kv_role="")
    finally:
        reader.close()
    outcomes = replay(config, instance.profile.step_time, requests)
    return len(requests) / max(outcome.finished_s or 0.0 for outcome in outcomes)


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


async def broadcast(
    sampled: Sequence[Planned], scheduler: str, urls: dict[str, str], form: RequestFormat, limits: LoadLimits
) -> list[Both]:
    """Request a decision for each request when it is due, and send the request to all engines."""
    start_s = time.monotonic()
    senders = {name: LoadSender(origin_of(url), form, limits) for name, url in urls.items()}

    async def one(planned: Planned, stub: Any) -> Both | None:
        await asyncio.sleep(max(0.0, start_s + planned.due_s - time.monotonic()))
        request = common_pb2.Request(
            request_id=f"sample-{planned.request_id}", model=MODEL, prompt_tokens=planned.prompt_tokens,
            max_tokens=planned.output_tokens, ignore_eos=True,
        )  # fmt: skip
        response = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request, dry_run=True), timeout=WITHIN_S)
        body = json.loads(body_of(planned, form)) | {"vllm_xargs": {"block_tag_tokens": planned.output_tokens}}
        encoded, now_s = json.dumps(body).encode(), time.monotonic()
        results = {name: RequestResult(plan=planned) for name in urls}
        await asyncio.gather(*(senders[name].send(planned, encoded, now_s, result) for name, result in results.items()))
        ends = {name: result.e2e_s for name, result in results.items() if result.failure is None and result.e2e_s}
        return Both(chosen=response.decision.instance.instance_id, e2e_s=ends) if len(ends) == len(urls) else None

    try:
        async with grpc.aio.insecure_channel(scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            ended = await asyncio.gather(*(one(planned, stub) for planned in sampled))
    finally:
        for sender in senders.values():
            sender.close()
    return [both for both in ended if both is not None]


def choices(both: Sequence[Both]) -> list[dict[str, Any]]:
    """Return how often the better engine was chosen, and what the other choices cost."""
    chosen_s = np.array([one.e2e_s[one.chosen] for one in both])
    best_s = np.array([min(one.e2e_s.values()) for one in both])
    worst_s = np.array([max(one.e2e_s.values()) for one in both])
    wrong, clear = chosen_s > best_s, worst_s > (1 + CLEAR) * best_s
    rows = [
        row("best_instance_share", float(np.mean(~wrong)), "ratio", len(both)),
        row("regret.mean", float(np.mean(chosen_s / best_s - 1)), "ratio", len(both)),
        row("regret_s.mean", float(np.mean(chosen_s - best_s)), "s", len(both)),
        row("possible_regret.mean", float(np.mean(worst_s / best_s - 1)), "ratio", len(both)),
    ]
    if wrong.any():
        rows.append(
            row("regret_when_wrong.median", float(np.median((chosen_s / best_s - 1)[wrong])), "ratio", int(wrong.sum()))
        )
    if clear.any():
        rows.append(row("clear_best_share", float(np.mean(~wrong[clear])), "ratio", int(clear.sum())))
    return rows


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


def forecast_requests(results: Sequence[RequestResult]) -> list[RequestResult]:
    """Return the requests with a whole response and a forecast."""
    return [one for one in results if one.failure is None and one.predicted_e2e_s is not None]


def forecast_errors(results: Sequence[RequestResult], shares: Sequence[int]) -> list[dict[str, Any]]:
    """Return the errors of the forecasts, and some percentiles of the latencies."""
    good = forecast_requests(results)
    rows = [row("failed_requests", len(results) - len(good), "requests", len(results))]
    for name in ("ttft", "tpot", "e2e"):
        pairs = [pair for one in good if (pair := predicted_and_actual(one, name)) is not None]
        errors = [(predicted - actual) / actual for predicted, actual in pairs]
        rows.append(row(f"{name}_error.median", statistics.median(map(abs, errors)), "ratio", len(errors)))
        rows.append(row(f"{name}_error.p90", float(np.percentile(np.abs(errors), 90)), "ratio", len(errors)))
        rows.append(row(f"{name}_error.bias", statistics.median(errors), "ratio", len(errors)))
        values = [actual for _, actual in pairs]
        rows += [row(f"{name}_s.p{share}", float(np.percentile(values, share)), "s", len(values)) for share in shares]
    return rows


def predicted_and_actual(one: RequestResult, name: str) -> tuple[float, float] | None:
    """Return a request's predicted and measured latency from sending on."""
    if one.predicted_ttft_s is None or one.predicted_e2e_s is None or one.ttft_s is None or one.e2e_s is None:
        return None
    if name != "tpot":
        return getattr(one, f"predicted_{name}_s"), getattr(one, f"{name}_s") - one.sent_s
    if one.tpot_s is None:
        return None
    return (one.predicted_e2e_s - one.predicted_ttft_s) / (one.output_tokens - 1), one.tpot_s


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


def progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}


if __name__ == "__main__":
    main()
