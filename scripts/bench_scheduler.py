"""The cost of a served scheduler: decision time and processor time, with stub sidecars that answer at once.

The scheduler is started by its command. All stub sidecars run in one other process, `--engines-per-sidecar` of them
behind one port; they count reservations as real ones do, but make no forecasts. Requests arrive as a Poisson process
and are released after a while. Everything is on loopback, so the times include the load on the same cores.

- `decision_ms.{policy}.{instances}.p50|p99`: from the request's arrival at the scheduler to its decision.
- `schedule_ms.{policy}.{instances}.p50|p99`: the same from the client.
- `scheduler_cpu_us.{policy}.{instances}`: processor time of the scheduler's process, all threads, user and system, per
  request scheduled and released; `bench_decision.py` measures the part of it without communication.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2, scheduler_pb2_grpc

PLACE = "127.0.0.1"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
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
    parser.add_argument("--sidecars", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sidecars:
        uvloop.run(serve_sidecars(arguments.sidecars, arguments.engines_per_sidecar))
        return
    results: list[dict[str, object]] = []
    for policy in arguments.policy or ["block"]:
        for num in arguments.instances or [12]:
            results += case(policy, num, arguments)
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        json.dump({"bench": "scheduler", "machine": machine, "results": results}, sys.stdout)
        print()
        return
    for result in results:
        print(f"{result['name']:44}{result['value']:>12.3f} {result['unit']:12} n={result['n']}")


def case(policy: str, num: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one policy with `num` instances."""
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_running(num, arguments.engines_per_sidecar))
        scheduler = stack.enter_context(scheduler_over(sidecars, policy))
        return uvloop.run(measured(scheduler, f"{name_of(policy)}.{num}", arguments.rate, arguments.seconds))


def name_of(policy: str) -> str:
    """Return a policy with its parameters as part of a result name, such as block-k8."""
    return "".join(letter for letter in policy.replace(":", "-") if letter.isalnum() or letter in "-_")


async def measured(scheduler: SchedulerProcess, name: str, rate: float, seconds: float) -> list[dict[str, object]]:
    """Send requests, and return the results."""
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
        raise RuntimeError("some decisions have no reservation")
    n = len(decisions)
    decision_ms = sorted(1e3 * decision.decision_s for decision in decisions)
    schedule_ms = sorted(1e3 * one for one in took_s)
    numbers = [
        (f"decision_ms.{name}.p50", quantile(decision_ms, 0.5), "ms"),
        (f"decision_ms.{name}.p99", quantile(decision_ms, 0.99), "ms"),
        (f"schedule_ms.{name}.p50", quantile(schedule_ms, 0.5), "ms"),
        (f"schedule_ms.{name}.p99", quantile(schedule_ms, 0.99), "ms"),
        (f"scheduler_cpu_us.{name}", 1e6 * cpu_s / n, "us"),
    ]
    return [{"name": name, "value": value, "unit": unit, "n": n} for name, value, unit in numbers]


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return a quantile."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


async def load(
    stub: scheduler_pb2_grpc.SchedulerAsyncStub,
    rng: random.Random,
    rate: float,
    seconds: float,
    seen: tuple[list[common_pb2.Decision], list[float]],
) -> None:
    """Send requests in an open loop; wait until the last one is released."""
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


# The scheduler.


class SchedulerProcess:
    """The scheduler's process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        """Store the process and its port."""
        self.port = port
        self._stat = Path(f"/proc/{process.pid}/stat")

    def cpu_s(self) -> float:
        """Return the processor time so far, of all threads, user and system."""
        fields = self._stat.read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def scheduler_over(sidecars: Sequence[int], policy: str) -> Iterator[SchedulerProcess]:
    """Run a scheduler, and read its port from its log."""
    command = [str(Path(sys.executable).with_name("block")), "serve", "scheduler", "--port", "0"]
    command += ["--log-format", "json", "--policy", policy, "--sidecar-deadline-ms", "1000"]
    command += [f"--instance=i{place}=http://{PLACE}:1,{PLACE}:{port}" for place, port in enumerate(sidecars)]
    with started(command, stderr=subprocess.PIPE) as process:
        for line in process.stderr or ():
            said = json.loads(line)
            if said["event"] == "serving":
                yield SchedulerProcess(process, said["port"])
                return
        raise RuntimeError("the scheduler did not start")


@contextmanager
def sidecars_running(num: int, together: int) -> Iterator[list[int]]:
    """Run stub sidecars in one process, which prints their ports as its first line."""
    command = [sys.executable, __file__, "--sidecars", str(num), "--engines-per-sidecar", str(together)]
    with started(command, stdout=subprocess.PIPE) as process:
        yield [int(port) for port in (process.stdout.readline() if process.stdout else "").split()]


@contextmanager
def started(command: list[str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    """Run a command for the duration of the block."""
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen(  # type: ignore[call-overload]
        command, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}, **streams
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


# Sidecars.


class StubSidecar:
    """Returns a forecast that grows with each reservation, and otherwise constant indicators."""

    def __init__(self, name: str) -> None:
        """Start without reservations."""
        self._held: set[str] = set()
        self._answer = predictor_pb2.PredictResponse(
            instance_id=name,
            epoch=7,
            state=common_pb2.INSTANCE_STATE_READY,
            predict_s=1e-4,
            indicators=common_pb2.Indicators(
                age_s=0.003, source=common_pb2.STATE_SOURCE_EXPORTED, num_running=24, num_waiting=2, num_reserved=0,
                num_total_blocks=1056, num_free_blocks=345, num_reserved_blocks=12, num_waiting_blocks=34,
                queued_prefill_tokens=1234, context_tokens=9876, remaining_tokens=5432, requests_per_minute=180.0,
                kv_hit_ratio=0.25, pace=1.01, step_s=0.031, num_preemptions_total=3, num_finished_total=999,
            ),
            predictions=[predictor_pb2.Prediction(prefix_hit_tokens=0, new_prefill_tokens=100)],
        )  # fmt: skip

    def _forecast(self, request: common_pb2.Request) -> predictor_pb2.PredictResponse:
        prediction = self._answer.predictions[0]
        prediction.request_id = request.request_id
        prediction.forecast.CopyFrom(
            common_pb2.Forecast(
                request_id=request.request_id, ttft_s=0.2 + 0.01 * len(self._held), e2e_s=7.0 + 0.1 * len(self._held),
                tpot_s=0.03, queue_s=0.1, output_tokens=210,
            )
        )  # fmt: skip
        self._answer.indicators.num_reserved = len(self._held)
        return self._answer

    def predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        """Return a forecast."""
        return self._forecast(request.requests[0]) if request.requests else self._answer

    async def watch(self, request: predictor_pb2.WatchRequest) -> Any:
        """Stream the indicators whenever the reservations change."""
        sequence, told = 0, -1
        while True:
            if len(self._held) != told:
                sequence, told = sequence + 1, len(self._held)
                self._answer.indicators.num_reserved = told
                yield predictor_pb2.WatchResponse(
                    instance_id=self._answer.instance_id,
                    sequence=sequence,
                    full=True,
                    indicators=self._answer.indicators,
                    version=self._answer.version,
                    epoch=7,
                    state=self._answer.state,
                )
            await asyncio.sleep(request.min_interval_s)

    def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Make a reservation, unless the version has changed."""
        response = predictor_pb2.ReserveResponse(
            instance_id=self._answer.instance_id, epoch=7, expires_in_s=request.ttl_s
        )
        if request.HasField("if_version") and request.if_version != self._answer.version:
            response.result = predictor_pb2.RESERVE_RESULT_CONFLICT
            response.prediction.CopyFrom(self._forecast(request.request).predictions[0])
        else:
            response.result = predictor_pb2.RESERVE_RESULT_RESERVED
            self._held.add(request.request.request_id)
            self._answer.version += 1
        response.version = self._answer.version
        response.indicators.CopyFrom(self._answer.indicators)
        return response

    def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        self._held.discard(request.request_id)
        return common_pb2.ReleaseResponse(released=True, indicators=self._answer.indicators)


class StubNode:
    """Stub sidecars behind one port."""

    def __init__(self, names: Sequence[str]) -> None:
        """Create a stub sidecar per instance."""
        self._sidecars = {name: StubSidecar(name) for name in names}

    async def predict(self, request: predictor_pb2.PredictRequest, _: Any) -> predictor_pb2.PredictResponse:
        """Return forecasts for one or several instances."""
        if request.instance_ids:
            answers = [self._sidecars[name].predict(request) for name in request.instance_ids]
            return predictor_pb2.PredictResponse(answers=answers)
        return self._sidecars[request.instance_id].predict(request)

    async def predict_stream(self, requests: Any, context: Any) -> Any:
        """Return forecasts over a stream."""
        async for request in requests:
            yield await self.predict(request, context)

    async def watch(self, request: predictor_pb2.WatchRequest, _: Any) -> Any:
        """Stream the indicators of one instance."""
        async for response in self._sidecars[request.instance_id].watch(request):
            yield response

    async def reserve(self, request: predictor_pb2.ReserveRequest, _: Any) -> predictor_pb2.ReserveResponse:
        """Make a reservation."""
        return self._sidecars[request.instance_id].reserve(request)

    async def reserve_stream(self, requests: Any, context: Any) -> Any:
        """Make reservations over a stream."""
        async for request in requests:
            yield await self.reserve(request, context)

    async def release(self, request: common_pb2.ReleaseRequest, _: Any) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        return self._sidecars[request.instance_id].release(request)


async def serve_sidecars(num: int, together: int) -> None:
    """Serve one port per node, print the port of each sidecar, and run until stopped."""
    ports, servers = [], []
    names = [f"i{place}" for place in range(num)]
    for first in range(0, num, together):
        here = names[first : first + together]
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handlers_of(StubNode(here)),))
        ports += len(here) * [server.add_insecure_port(f"{PLACE}:0")]
        await server.start()
        servers.append(server)
    print(*ports, flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def handlers_of(one: StubNode) -> grpc.GenericRpcHandler:
    """Return the gRPC handlers of a node."""
    question, answer = predictor_pb2.PredictRequest.FromString, predictor_pb2.PredictResponse.SerializeToString
    handlers: dict[str, Any] = {
        "Predict": grpc.unary_unary_rpc_method_handler(one.predict, question, answer),
        "Watch": grpc.unary_stream_rpc_method_handler(
            one.watch, predictor_pb2.WatchRequest.FromString, predictor_pb2.WatchResponse.SerializeToString
        ),
        "PredictStream": grpc.stream_stream_rpc_method_handler(one.predict_stream, question, answer),
        "Reserve": grpc.unary_unary_rpc_method_handler(
            one.reserve, predictor_pb2.ReserveRequest.FromString, predictor_pb2.ReserveResponse.SerializeToString
        ),
        "ReserveStream": grpc.stream_stream_rpc_method_handler(
            one.reserve_stream,
            predictor_pb2.ReserveRequest.FromString,
            predictor_pb2.ReserveResponse.SerializeToString,
        ),
        "Release": grpc.unary_unary_rpc_method_handler(
            one.release, common_pb2.ReleaseRequest.FromString, common_pb2.ReleaseResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("block.v1.Predictor", handlers)


if __name__ == "__main__":
    main()
