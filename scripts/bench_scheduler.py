"""What a scheduler that serves costs: time until a decision, and processor time, over sidecars that answer at once.

The scheduler runs as its users run it; the sidecars are all in one other process, where they forecast nothing but count
promises as real ones do, `--engines-per-sidecar` of them behind one port; requests come at random (Poisson) at a fixed
rate, and are released after a while. Everything stays on loopback, so the times include what the sidecars and the load
take from the same cores.

- `decision_ms.{policy}.{instances}.p50|p99`: from the scheduler's taking a request to its decision, as it says itself.
- `schedule_ms.{policy}.{instances}.p50|p99`: the same as its client sees it.
- `scheduler_cpu_us.{policy}.{instances}`: processor time of the scheduler's process, all threads, user and system, per
  request scheduled and released; what `bench_decision.py` measures is the part of it that is no communication.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import ExitStack

import grpc
import uvloop

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.asking import quantile
from scripts.running import Running, block_serving, instance_flags, report, sidecars_running
from scripts.stand_ins import PLACE

STAY_S = 2.0  # from a decision to its release
WARM_UP_S = 2.0


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", action="append", help="Repeatable; block by default.")
    parser.add_argument("--instances", type=int, action="append", help="Repeatable; 12 by default.")
    parser.add_argument("--rate", type=float, default=36.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--engines-per-sidecar", type=int, default=16)
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    for policy in arguments.policy or ["block"]:
        for num in arguments.instances or [12]:
            results += case(policy, num, arguments)
    report("scheduler", results, as_json=arguments.json)


def case(policy: str, num: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one policy over so many instances."""
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_running(num, arguments.engines_per_sidecar))
        flags = ["--policy", policy, "--sidecar-deadline-ms", "1000", *instance_flags(sidecars)]
        scheduler = stack.enter_context(block_serving("scheduler", *flags))
        return uvloop.run(measured(scheduler, f"{name_of(policy)}.{num}", arguments.rate, arguments.seconds))


def name_of(policy: str) -> str:
    """Write a policy with its parameters as a part of a name: block-k8."""
    return "".join(letter for letter in policy.replace(":", "-") if letter.isalnum() or letter in "-_")


async def measured(scheduler: Running, name: str, rate: float, seconds: float) -> list[dict[str, object]]:
    """Let requests come and go, and put what they saw into numbers."""
    rng = random.Random(0)
    decisions: list[common_pb2.Decision] = []
    took_s: list[float] = []
    async with grpc.aio.insecure_channel(f"{PLACE}:{scheduler.port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        await load(stub, rng, rate, WARM_UP_S, ([], []))
        cpu_s = scheduler.cpu_s()
        await load(stub, rng, rate, seconds, (decisions, took_s))
        cpu_s = scheduler.cpu_s() - cpu_s
    if not all(decision.HasField("reserved_for_s") for decision in decisions):
        raise RuntimeError("some decisions hold no place")
    n = len(decisions)
    decision_ms = [1e3 * decision.decision_s for decision in decisions]
    schedule_ms = [1e3 * one for one in took_s]
    numbers = [
        (f"decision_ms.{name}.p50", quantile(decision_ms, 0.5), "ms"),
        (f"decision_ms.{name}.p99", quantile(decision_ms, 0.99), "ms"),
        (f"schedule_ms.{name}.p50", quantile(schedule_ms, 0.5), "ms"),
        (f"schedule_ms.{name}.p99", quantile(schedule_ms, 0.99), "ms"),
        (f"scheduler_cpu_us.{name}", 1e6 * cpu_s / n, "us"),
    ]
    return [{"name": name, "value": value, "unit": unit, "n": n} for name, value, unit in numbers]


async def load(
    stub: scheduler_pb2_grpc.SchedulerAsyncStub,
    rng: random.Random,
    rate: float,
    seconds: float,
    seen: tuple[list[common_pb2.Decision], list[float]],
) -> None:
    """Send requests at their own times, whatever becomes of those before; wait for the last to be released."""
    decisions, took_s = seen

    async def one(number: int) -> None:
        request = common_pb2.Request(
            request_id=f"{seconds}/{number}", model="m", prompt_tokens=rng.randint(10, 2000), max_tokens=1024
        )
        request.tag.CopyFrom(common_pb2.Tag(median_tokens=rng.randint(10, 500), spread=0.5, estimator="bench"))
        start_s = time.perf_counter()
        response = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request))
        took_s.append(time.perf_counter() - start_s)
        decisions.append(response.decision)
        await asyncio.sleep(rng.expovariate(1 / STAY_S))
        outcome = common_pb2.Outcome(
            request_id=request.request_id, output_tokens=9, finish_reason=common_pb2.FINISH_REASON_STOP
        )
        await stub.Release(
            common_pb2.ReleaseRequest(
                request_id=request.request_id, instance_id=response.decision.instance.instance_id, outcome=outcome
            )
        )

    async with asyncio.TaskGroup() as group:
        start_s, due_s, number = time.perf_counter(), 0.0, 0
        while due_s < seconds:
            await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
            group.create_task(one(number))
            number += 1
            due_s += rng.expovariate(rate)


if __name__ == "__main__":
    main()
