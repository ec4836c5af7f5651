"""What a decision costs in a running process: time and processor time, over sidecars that answer at once.

The scheduler is started by its command. The sidecars are stand-ins in one other process, `--engines-per-sidecar` of
them behind one port: they count reservations as real ones do, but simulate nothing. Requests arrive as a Poisson
process and are released after a while. Everything is on loopback, and the sidecars and the load use the same cores.
With `--decide in-process` the same driver decides without a scheduler, as in a gateway; its process also makes the
load, which is a small part of the time. With `--deadlines` requests have targets, which the stand-ins say are kept.

- `decision_ms.{policy}.{instances}.p50|p99`: from the arrival of a request to its decision, as the decision reports it.
- `schedule_ms.{policy}.{instances}.p50|p99`: the same, measured by its client.
- `scheduler_cpu_us.{policy}.{instances}`: processor time of the process that decides, all threads, user and system, per
  request placed and released; `bench_decision.py` measures its part without communication.
- `sidecars_cpu_us.{policy}.{instances}`: processor time of the stand-ins for all sidecars, per request.
- `load_cpu_us.{policy}.{instances}`: with `--decide in-process`, what the load alone takes of `scheduler_cpu_us`.
- `wake_up_cpu_us`: processor time of one timer in a process that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import services  # noqa: F401 - sets options of gRPC, which it reads when it is imported

# isort: split
import grpc
import uvloop
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.bench_requests import PLACE
from scripts.load_client import quantile
from scripts.processes import Running, StandInSidecars, block_serving, instance_flags, sidecars_running
from scripts.report import report
from services.instances.instance import instance_from_flag
from services.instances.sources import Listed
from services.placement.lifecycle import placement_driver
from services.placement.settings import SchedulerSettings

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
    parser.add_argument("--decide", choices=("scheduler", "in-process"), default="scheduler")
    parser.add_argument("--deadlines", action="store_true", help="Requests have a TTFT and a TPOT target.")
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    for policy in arguments.policy or ["block"]:
        for num in arguments.instances or [12]:
            results += case(policy, num, arguments)
    results.append(uvloop.run(wake_up(arguments.rate)))
    report("scheduler", results, as_json=arguments.json)


def case(policy: str, num: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one policy with a number of instances."""
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_running(num, arguments.engines_per_sidecar))
        name, rate, seconds = f"{name_of(policy)}.{num}", arguments.rate, arguments.seconds
        slo = common_pb2.Slo(ttft_s=2.0, tpot_s=0.1) if arguments.deadlines else None
        if arguments.decide == "in-process":
            return uvloop.run(measured_in_process(policy, sidecars, name, rate, seconds, slo))
        flags = ["--policy", policy, "--sidecar-deadline-ms", "1000", *instance_flags(sidecars)]
        scheduler = stack.enter_context(block_serving("scheduler", *flags))
        return uvloop.run(measured(scheduler, sidecars, name, rate, seconds, slo))


def name_of(policy: str) -> str:
    """Return a policy with its parameters as part of a name: block-k8."""
    return "".join(letter for letter in policy.replace(":", "-") if letter.isalnum() or letter in "-_")


Schedule = Callable[[common_pb2.Request], Awaitable[common_pb2.Decision]]
Release = Callable[[common_pb2.ReleaseRequest], Awaitable[object]]


async def measured(  # noqa: PLR0917 - what a load is made of
    scheduler: Running, sidecars: StandInSidecars, name: str, rate: float, seconds: float, slo: common_pb2.Slo | None
) -> list[dict[str, object]]:
    """Measure a scheduler."""
    async with grpc.aio.insecure_channel(f"{PLACE}:{scheduler.port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)

        async def schedule(request: common_pb2.Request) -> common_pb2.Decision:
            return (await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request))).decision

        return await numbers_of(schedule, stub.Release, (scheduler.cpu_s, sidecars.cpu_s), name, rate, seconds, slo)


async def measured_in_process(  # noqa: PLR0917 - what a load is made of
    policy: str, sidecars: StandInSidecars, name: str, rate: float, seconds: float, slo: common_pb2.Slo | None
) -> list[dict[str, object]]:
    """Measure decisions of this process."""
    settings = SchedulerSettings(policy=policy, sidecar_deadline_s=1.0, scheduler_id="bench")
    source = Listed([instance_from_flag(flag.removeprefix("--instance=")) for flag in instance_flags(sidecars)])
    load_us = await load_alone(rate, seconds)
    async with placement_driver(settings, source, CollectorRegistry()) as driver:

        async def schedule(request: common_pb2.Request) -> common_pb2.Decision:
            return await driver.schedule(scheduler_pb2.ScheduleRequest(request=request))

        clocks = (time.process_time, sidecars.cpu_s)
        numbers = await numbers_of(schedule, driver.outcomes.release, clocks, name, rate, seconds, slo)
    return [*numbers, {"name": f"load_cpu_us.{name}", "value": load_us, "unit": "us", "n": numbers[0]["n"]}]


async def load_alone(rate: float, seconds: float) -> float:
    """Return the processor time of the load per request, in microseconds, with decisions that cost nothing."""
    decision = common_pb2.Decision()

    async def schedule(_request: common_pb2.Request) -> common_pb2.Decision:
        return decision

    async def release(_request: common_pb2.ReleaseRequest) -> None:
        pass

    decisions: list[common_pb2.Decision] = []
    before_s = time.process_time()
    await load(schedule, release, random.Random(0), rate, seconds, (decisions, []), None)
    return 1e6 * (time.process_time() - before_s) / len(decisions)


async def wake_up(rate: float) -> dict[str, object]:
    """Measure a process that only sleeps."""
    count, before_s = round(3 * rate), time.process_time()
    for _ in range(count):
        await asyncio.sleep(1 / rate)
    value = 1e6 * (time.process_time() - before_s) / count
    return {"name": "wake_up_cpu_us", "value": value, "unit": "us", "n": count}


async def numbers_of(  # noqa: PLR0917 - what a load is made of
    schedule: Schedule,
    release: Release,
    clocks: tuple[Callable[[], float], Callable[[], float]],
    name: str,
    rate: float,
    seconds: float,
    slo: common_pb2.Slo | None,
) -> list[dict[str, object]]:
    """Send the load and summarise it; `clocks` are the processor times of the deciding process and of the sidecars."""
    rng = random.Random(0)
    decisions: list[common_pb2.Decision] = []
    took_s: list[float] = []
    await load(schedule, release, rng, rate, WARM_UP_S, ([], []), slo)
    before_s = [clock() for clock in clocks]
    await load(schedule, release, rng, rate, seconds, (decisions, took_s), slo)
    cpu_s, sidecars_cpu_s = (clock() - before for clock, before in zip(clocks, before_s, strict=True))
    if not all(decision.HasField("reserved_for_s") for decision in decisions):
        raise RuntimeError("some requests were placed without a reservation")
    n = len(decisions)
    decision_ms = [1e3 * decision.decision_s for decision in decisions]
    schedule_ms = [1e3 * one for one in took_s]
    numbers = [
        (f"decision_ms.{name}.p50", quantile(decision_ms, 0.5), "ms"),
        (f"decision_ms.{name}.p99", quantile(decision_ms, 0.99), "ms"),
        (f"schedule_ms.{name}.p50", quantile(schedule_ms, 0.5), "ms"),
        (f"schedule_ms.{name}.p99", quantile(schedule_ms, 0.99), "ms"),
        (f"scheduler_cpu_us.{name}", 1e6 * cpu_s / n, "us"),
        (f"sidecars_cpu_us.{name}", 1e6 * sidecars_cpu_s / n, "us"),
    ]
    return [{"name": name, "value": value, "unit": unit, "n": n} for name, value, unit in numbers]


async def load(  # noqa: PLR0917 - what a load is made of
    schedule: Schedule,
    release: Release,
    rng: random.Random,
    rate: float,
    seconds: float,
    seen: tuple[list[common_pb2.Decision], list[float]],
    slo: common_pb2.Slo | None,
) -> None:
    """Send requests at their arrival times, without waiting for earlier ones; return when the last one is released."""
    decisions, took_s = seen

    async def one(number: int) -> None:
        request = common_pb2.Request(
            request_id=f"{seconds}/{number}", model="m", prompt_tokens=rng.randint(10, 2000), max_tokens=1024, slo=slo
        )
        request.tag.CopyFrom(common_pb2.Tag(median_tokens=rng.randint(10, 500), spread=0.5, estimator="bench"))
        start_s = time.perf_counter()
        decision = await schedule(request)
        took_s.append(time.perf_counter() - start_s)
        decisions.append(decision)
        await asyncio.sleep(rng.expovariate(1 / STAY_S))
        outcome = common_pb2.Outcome(
            request_id=request.request_id, output_tokens=9, finish_reason=common_pb2.FINISH_REASON_STOP
        )
        await release(
            common_pb2.ReleaseRequest(
                request_id=request.request_id, instance_id=decision.instance.instance_id, outcome=outcome
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
