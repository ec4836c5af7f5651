"""The live system under the paper's heaviest load: decision times, the quality of decisions, and forecast errors.

Emulated engines (Llama-2-7B on A30), their sidecars, a tagger, a scheduler and a gateway run as processes of this
machine; `--speed` slows the engines down until the machine is not the limit (all times but decisions' are engine time).
Requests arrive as a Poisson process with ShareGPT's lengths.

- `decision_ms`: from the request's arrival at the scheduler to its decision, with the reservation, by the wall clock.
- `placing_ms`: the same from the gateway, with the call to the scheduler.
- `e2e_error`: the error of the forecast in the reply's headers, against the client's latency from sending on.
- `best_instance_share`: of a sample of requests, the share that went to the instance where they would have ended first.
  All engines' states are recorded when a sampled request is sent; later, when all true lengths are known, the request
  is forecast on each of them again.
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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.profile import load_profile
from predictor.request import RequestFacts
from predictor.snapshot import LiveRequest, Snapshot
from scripts.report import machine
from services.cluster import Cluster, ClusterSettings, running
from services.decision_recordings import decisions_in
from services.engine_state.identity import client_id
from services.engine_state.reader import Reader
from services.engine_state.snapshot import snapshot_from_view
from services.engine_state.view import UnreadableError, View
from services.http.origin import origin_of
from services.load.request_format import RequestFormat
from services.load.running import LoadLimits, run_plan
from services.logs import configure
from simulator.load_plan import Planned, Timing, by_arrival, planned
from simulator.load_report import RequestResult
from simulator.reference_data import data_folder
from simulator.traces import trace_from

PROFILE = "llama-2-7b-a30"
MODEL = "bench"
LENGTHS = "lengths/block_sharegpt_v3_58k_lens.csv"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class DecisionSample:
    """The states of all engines when a request was sent."""

    request_id: str
    after_s: float  # since the start, engine time
    views: dict[str, View] = field(default_factory=dict)


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--instances", type=int, default=12)
    parser.add_argument("--rate", type=float, default=36.0, help="requests per second of engine time")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the load, engine time")
    parser.add_argument("--speed", type=float, default=0.5, help="engine seconds per second")
    parser.add_argument("--policy", default="block")
    parser.add_argument("--lengths", choices=("known", "tagged"), default="known", help="how lengths are known")
    parser.add_argument("--sample", type=float, default=0.05, help="share of decisions that are sampled")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure("warning", "text")
    with tempfile.TemporaryDirectory() as folder:
        measured = uvloop.run(measure(arguments, str(Path(folder, "decisions.jsonl"))))
    if arguments.json:
        json.dump(
            {"bench": "bench_live", "machine": machine(), "settings": vars(arguments), "results": measured}, sys.stdout
        )
        print()
        return
    for row in measured:
        print(f"{row['name']:36} {row['value']:12.4f} {row['unit']:9} n={row['n']}")


async def measure(arguments: argparse.Namespace, record: str) -> list[dict[str, Any]]:
    """Start the system, send the load, and return the results; decisions are recorded in a file."""
    plan = plan_of(arguments)
    settings = ClusterSettings(
        instances=arguments.instances, policies=(arguments.policy,), port=0, log_level="warning",
        engine_flags=("--profile", PROFILE, "--speed", str(arguments.speed), "--served-model-name", MODEL),
        scheduler_flags=("--forecast-always", "--record", record),
    )  # fmt: skip
    form = RequestFormat(
        model=MODEL, output="ignore-eos" if arguments.lengths == "known" else "header", time_scale=arguments.speed
    )
    async with running(settings, lambda name: print(f"{name} serves", file=sys.stderr)) as cluster:
        origin = origin_of(cluster.gateway_urls[arguments.policy])
        before = processor_times(cluster)
        start_s = time.monotonic()
        sampling = asyncio.create_task(sample(plan, cluster, arguments))
        ended: list[RequestResult] = []
        results = await run_plan(plan, origin, form, LoadLimits(timeout_s=3600.0), ended.append)
        samples = await sampling
        wall_s = time.monotonic() - start_s
        used = {kind: seconds - before[kind] for kind, seconds in processor_times(cluster).items()}
    decision_ms = [1000 * decision.decision_s for decision in decisions_in(record)]
    return [*quantiles_of("decision_ms", decision_ms, "ms"), *summed_up(results, samples, used, wall_s, arguments)]


def plan_of(arguments: argparse.Namespace) -> list[Planned]:
    """Draw ShareGPT requests that fit an A30, and their arrival times."""
    generator = np.random.default_rng(arguments.seed)
    num = round(arguments.rate * arguments.seconds)
    lengths = trace_from(str(data_folder() / LENGTHS)).requests
    fitting = [one for one in lengths if one.prompt_tokens + (one.output_tokens or 1) <= 4096]
    chosen = [fitting[place] for place in generator.integers(0, len(fitting), num)]
    named = [replace(request, request_id=str(number)) for number, request in enumerate(chosen)]
    return planned(by_arrival(named, None), Timing(kind="poisson", rate=arguments.rate), generator)


async def sample(plan: Sequence[Planned], cluster: Cluster, arguments: argparse.Namespace) -> list[DecisionSample]:
    """Read the engines' states when sampled requests are sent; they are evaluated later."""
    generator = np.random.default_rng(arguments.seed + 1)
    start_s = time.monotonic()
    paths = {path.stem: str(path) for path in cluster.folder.glob("engine-*.state")}
    samples = []
    for one in plan:
        if generator.random() < arguments.sample:
            await asyncio.sleep(max(0.0, start_s + one.due_s / arguments.speed - time.monotonic()))
            after_s = (time.monotonic() - start_s) * arguments.speed
            views = {name: view for name, path in paths.items() if (view := view_of(path)) is not None}
            samples.append(DecisionSample(request_id=one.request_id, after_s=after_s, views=views))
    return samples


def view_of(path: str) -> View | None:
    """Read one engine's state into new memory; None while the engine writes it."""
    reader = Reader(path)
    try:
        return reader.read(contents=False)
    except UnreadableError:
        return None
    finally:
        reader.close()


def quantiles_of(name: str, values: Sequence[float], unit: str) -> list[dict[str, Any]]:
    """Return the median and the 99th percentile."""
    return [
        {"name": f"{name}.p{share}", "value": float(np.percentile(values, share)), "unit": unit, "n": len(values)}
        for share in (50, 99)
    ]


def summed_up(
    results: Sequence[RequestResult], samples: Sequence[DecisionSample], used: dict[str, float], wall_s: float,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the results."""
    good = [result for result in results if result.failure is None]
    placing_ms = [1000 * result.decision_s for result in results if result.decision_s is not None]
    rows = quantiles_of("placing_ms", placing_ms, "ms")

    def add(name: str, value: float, unit: str, n: int) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "n": n})

    add("failed_requests", len(results) - len(good), "requests", len(results))
    for name in ("ttft", "e2e"):
        pairs = [
            (getattr(one, f"predicted_{name}_s"), getattr(one, f"{name}_s") - one.sent_s)
            for one in good
            if getattr(one, f"predicted_{name}_s") is not None
        ]
        errors = [(predicted - actual) / actual for predicted, actual in pairs]
        add(f"{name}_error.median", statistics.median(map(abs, errors)), "ratio", len(errors))
        add(f"{name}_error.bias", statistics.median(errors), "ratio", len(errors))
    ranks = [rank for one in samples if (rank := rank_of(one, results, arguments.speed)) is not None]
    if ranks:
        add("best_instance_share", sum(rank == 0 for rank in ranks) / len(ranks), "ratio", len(ranks))
        add("chosen_instance_rank.mean", 1 + statistics.mean(ranks), "rank", len(ranks))
    for name in ("ttft", "e2e"):
        rows += quantiles_of(f"{name}_s", [getattr(one, f"{name}_s") for one in good], "engine s")
    add("sent_late_s.p99", float(np.percentile([one.sent_s for one in results], 99)), "engine s", len(results))
    for kind, seconds in used.items():
        add(f"cpu_share.{kind}", seconds / wall_s / (os.cpu_count() or 1), "of all", 1)
    add("slowed_down_by", 1 / arguments.speed, "times", 1)
    return rows


def rank_of(sample: DecisionSample, results: Sequence[RequestResult], speed: float) -> int | None:
    """Return the number of instances that would have been better than the chosen one, with true lengths."""
    lengths = {one.plan.request_id: one.plan for one in results}
    chosen = next(one for one in results if one.plan.request_id == sample.request_id)
    if chosen.instance not in sample.views:
        return None
    profile = load_profile(PROFILE)
    ends = {}
    for name, view in sample.views.items():
        snapshot = with_reservations(snapshot_from_view(view), name, sample, results, speed)
        engine = engine_from(with_lengths(snapshot, lengths), profile.step_time)
        candidate = RequestFacts(
            request_id="candidate", prompt_tokens=chosen.plan.prompt_tokens, output_tokens=chosen.plan.output_tokens
        )
        (forecast,) = Forecaster(engine).forecast([candidate], snapshot.taken_s, delays=False)
        ends[name] = forecast.e2e_s
    return sum(end < ends[chosen.instance] for end in ends.values())


def with_reservations(
    snapshot: Snapshot, name: str, sample: DecisionSample, results: Sequence[RequestResult], speed: float
) -> Snapshot:
    """Add the requests that had been sent to the engine but were not in its state yet."""
    shown = {plan_id(item.request.request_id) for item in (*snapshot.running, *snapshot.waiting)}
    on_their_way = [
        one.plan
        for one in results
        if one.instance == name and one.plan.request_id not in shown and one.plan.request_id != sample.request_id
        and one.plan.due_s + one.sent_s + (one.decision_s or 0.0) * speed <= sample.after_s
        and (one.ttft_s is None or sample.after_s < one.plan.due_s + one.ttft_s)
    ]  # fmt: skip
    reserved = (
        RequestFacts(request_id=f"-{one.request_id}", prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
        for one in on_their_way
    )
    return replace(snapshot, reserved=tuple(reserved))


def plan_id(name: str) -> str:
    """Return the plan's id of a request from its name at an engine or a sidecar."""
    return client_id(name).partition("-")[2]


def with_lengths(snapshot: Snapshot, plans: dict[str, Planned]) -> Snapshot:
    """Set the true lengths of all requests of a snapshot."""

    def known(request: RequestFacts) -> RequestFacts:
        plan = plans.get(plan_id(request.request_id))
        return request if plan is None else replace(request, output_tokens=plan.output_tokens, tag=None)

    def live(items: tuple[LiveRequest, ...]) -> tuple[LiveRequest, ...]:
        return tuple(replace(item, request=known(item.request)) for item in items)

    return replace(
        snapshot,
        running=live(snapshot.running),
        waiting=live(snapshot.waiting),
        reserved=tuple(known(request) for request in snapshot.reserved),
    )


def processor_times(cluster: Cluster) -> dict[str, float]:
    """Return the processor seconds so far: of each program, of this process, and of the whole machine."""
    used: dict[str, float] = {}
    for name, child in cluster.children.items():
        fields = Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        kind = name.partition("-")[0]
        used[kind] = used.get(kind, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    used["load"] = time.process_time()
    busy = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    used["machine"] = (sum(map(int, busy)) - int(busy[3]) - int(busy[4])) / TICKS_PER_S
    return used


if __name__ == "__main__":
    main()
