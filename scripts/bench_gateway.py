"""The overhead of the gateway per request: processor time and added TTFT, compared with direct requests to engines.

Four stub engines that answer at once or at an engine's pace, a stub scheduler that decides round-robin over real gRPC,
and the gateway are separate processes; prompts have 2 KB, responses are streams of 16 events, all over loopback.

- `router_cpu_ms_per_request`: processor time (user and system) of the gateway's process, over all requests of the runs
  with engines that answer at once, 16 in flight; every request is scheduled, streamed and released.
- `added_ttft_ms`: 16 in flight, engines at an engine's pace (first event after 40 ms, then one every 8 to 12 ms, drawn
  per request, so that requests do not start in step): time to the first event through the gateway minus the same
  directly, in alternating runs.
- `requests_per_s`: the throughput with 1 and 16 in flight, with the load and the stub engines on the same cores.

Direct and routed runs alternate for several rounds; a result is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import httptools
import uvloop

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.http.client import HttpClient, Origin, origin_of, request_head
from services.http.sse import StreamReader

NUM_ENGINES = 4
NUM_EVENTS = 16
PROMPT_BYTES = 2048
FIRST_MS, GAPS_MS = 40, (8, 9, 10, 11, 12)
ROUNDS = 5
WARM_UP = 200
PLACE = "127.0.0.1"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TARGET = b"/v1/completions"


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds")
    parser.add_argument("--requests", type=int, default=1500, help="per round with engines that answer at once")
    parser.add_argument("--paced-requests", type=int, default=300, help="per round with engines at an engine's pace")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        uvloop.run(PARTS[arguments.part]())
        return
    with ExitStack() as stack:
        engines = [stack.enter_context(part("engine")) for _ in range(NUM_ENGINES)]
        environment = {"BLOCK_BENCH_ENGINES": ",".join(engine.url for engine in engines)}
        scheduler = stack.enter_context(part("scheduler", environment))
        gateway = stack.enter_context(gateway_before(scheduler.port))
        cases = cases_of(arguments.requests, arguments.paced_requests)
        results = uvloop.run(measured(engines, gateway, cases, arguments.rounds))
    if arguments.json:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        json.dump({"bench": "gateway", "machine": machine, "results": results}, sys.stdout)
        print()
        return
    for result in results:
        print(f"{result['name']:44}{result['value']:>12.3f} {result['unit']:12} n={result['n']}")


# Measuring.


@dataclass(kw_only=True)
class GatewaySample:
    """Times of requests, and the gateway's processor time for them."""

    ttft_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def rate(self) -> float:
        """Requests per second."""
        return len(self.e2e_ms) / self.wall_s

    def cpu_ms(self) -> float:
        """Processor time per request."""
        return 1000 * self.cpu_s / len(self.e2e_ms)


@dataclass(kw_only=True)
class Case:
    """A number of requests and how many are in flight, with the samples of each round."""

    name: str
    bodies: list[bytes]
    num: int
    at_a_time: int
    direct: list[GatewaySample] = field(default_factory=list)
    routed: list[GatewaySample] = field(default_factory=list)


def cases_of(num: int, num_paced: int) -> list[Case]:
    """Return the cases to measure."""
    at_once, paced = [body_for(0, 0)], [body_for(FIRST_MS, gap_ms) for gap_ms in GAPS_MS]
    return [
        Case(name="c1", bodies=at_once, num=max(1, num // 3), at_a_time=1),
        Case(name="c16", bodies=at_once, num=num, at_a_time=16),
        Case(name="paced", bodies=paced, num=num_paced, at_a_time=16),
    ]


async def measured(engines: list[Part], gateway: Part, cases: list[Case], rounds: int) -> list[dict[str, object]]:
    """Run all cases, alternating between direct and routed runs, so that both see the same load."""
    direct_to, through = [origin_of(engine.url) for engine in engines], [origin_of(gateway.url)]
    client = HttpClient()
    warm_up = Case(name="warm-up", bodies=[body_for(0, 0)], num=WARM_UP, at_a_time=16)
    for case in (warm_up, *rounds * cases):
        case.direct.append(await load(client, direct_to, case, gateway))
        case.routed.append(await load(client, through, case, gateway))
    client.close()
    return list(results_of({case.name: case for case in cases}))


def results_of(cases: dict[str, Case]) -> Iterator[dict[str, object]]:
    """Yield the results."""
    for name, case in (("", cases["c16"]), (".paced", cases["paced"]), (".c1", cases["c1"])):
        yield median(f"router_cpu_ms_per_request{name}", "ms", case, [sample.cpu_ms() for sample in case.routed])
    paced = cases["paced"]
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        direct = [quantile(sample.ttft_ms, fraction) for sample in paced.direct]
        routed = [quantile(sample.ttft_ms, fraction) for sample in paced.routed]
        added = [through - straight for through, straight in zip(routed, direct, strict=True)]
        for what, values in (("added", added), ("direct", direct), ("gateway", routed)):
            yield median(f"{what}_ttft_ms.{name}", "ms", paced, values)
    for case in (cases["c1"], cases["c16"]):
        for way, samples in (("direct", case.direct), ("gateway", case.routed)):
            rates = [sample.rate() for sample in samples]
            yield median(f"requests_per_s.{way}.{case.name}", "requests/s", case, rates)
            times = [quantile(sample.e2e_ms, 0.5) for sample in samples]
            yield median(f"e2e_ms.{way}.{case.name}.p50", "ms", case, times)


def median(name: str, unit: str, case: Case, values: list[float]) -> dict[str, object]:
    """Return one result; `n` is the number of requests over all rounds."""
    return {"name": name, "value": statistics.median(values), "unit": unit, "n": case.num * len(values)}


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile."""
    if fraction == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


async def load(client: HttpClient, origins: list[Origin], case: Case, gateway: Part) -> GatewaySample:
    """Send the requests of a case, and return their times."""
    sample = GatewaySample()
    rng = random.Random(0)
    left = iter([(number, rng.choice(case.bodies)) for number in range(case.num)])
    headers = [(b"content-type", b"application/json")]

    async def one_after_the_other() -> None:
        for number, body in left:
            origin = origins[number % len(origins)]
            start_s = time.perf_counter()
            connection = await client.send(origin, request_head(b"POST", origin, TARGET, headers, len(body)), body, 10)
            reader = StreamReader()
            reader.feed(await connection.read(10))
            first_s = time.perf_counter()
            while not connection.drained():
                reader.feed(await connection.read(10))
            end_s = time.perf_counter()
            if connection.status != 200 or reader.num_data != NUM_EVENTS + 1:
                raise RuntimeError(f"a response with status {connection.status} and {reader.num_data} events")
            connection.release()
            sample.ttft_ms.append(1000 * (first_s - start_s))
            sample.e2e_ms.append(1000 * (end_s - start_s))

    cpu_s, start_s = gateway.cpu_s(), time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(case.at_a_time)))
    sample.wall_s = time.perf_counter() - start_s
    await gateway.settled()
    sample.cpu_s = gateway.cpu_s() - cpu_s
    return sample


def body_for(first_ms: int, gap_ms: int) -> bytes:
    """Return a request of 2 KB, which tells the stub engine its pace."""
    words = random.Random(0)
    text = " ".join("".join(words.choices("abcdefghij", k=words.randint(2, 9))) for _ in range(400))[:PROMPT_BYTES]
    fields = {"model": "bench", "prompt": text, "max_tokens": NUM_EVENTS, "ignore_eos": True, "stream": True}
    return json.dumps({**fields, "user": f"pace {first_ms} {gap_ms} end"}).encode()


# Processes.


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process that serves on a port."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        """The URL of the process."""
        return f"http://{PLACE}:{self.port}"

    def cpu_s(self) -> float:
        """The processor time of the process so far, of all threads, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    async def settled(self) -> None:
        """Wait until its background work is done."""
        client = HttpClient()
        origin = origin_of(self.url)
        for _ in range(200):
            _, text = await client.get(origin, b"/metrics", within_s=5)
            if b"\nblock_gateway_releases_waiting 0.0" in text:
                break
            await asyncio.sleep(0.005)
        client.close()


@contextmanager
def part(name: str, environment: dict[str, str] | None = None) -> Iterator[Part]:
    """Run a part of this script as a process, which prints its port as the first line."""
    command = [sys.executable, __file__, "--part", name]
    with started(command, environment or {}, stdout=subprocess.PIPE) as process:
        line = process.stdout.readline() if process.stdout else ""
        yield Part(process=process, port=int(line))


@contextmanager
def gateway_before(scheduler_port: int) -> Iterator[Part]:
    """Run the gateway by its command, and read its port from its log."""
    command = [str(Path(sys.executable).with_name("block")), "serve", "gateway", "--port", "0", "--log-format", "json"]
    command += ["--scheduler", f"{PLACE}:{scheduler_port}"]
    with started(command, {}, stderr=subprocess.PIPE) as process:
        for line in process.stderr or ():
            said = json.loads(line)
            if said["event"] == "serving":
                yield Part(process=process, port=said["port"])
                return
        raise RuntimeError("the gateway did not start")


@contextmanager
def started(command: list[str], environment: dict[str, str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    """Run a command for the duration of the block."""
    root = str(Path(__file__).parents[1])
    process = subprocess.Popen(  # type: ignore[call-overload]
        command, text=True, cwd=root, env={**os.environ, **environment, "PYTHONPATH": root}, **streams
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


# The stub engine.


class StubEngine(asyncio.Protocol):
    """Answers every request with a stream of events, at the pace that the request has."""

    def __init__(self) -> None:
        """Start without a connection."""
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Start the response."""
        _, first_ms, gap_ms, _ = self._body[self._body.rindex(b"pace") :].split(b" ", 3)
        self._body = b""
        if first_ms == b"0":
            self._transport.write(HEAD + b"".join(EVENTS))
        else:
            self._later(0, int(first_ms) / 1000, int(gap_ms) / 1000)

    def _later(self, number: int, pause_s: float, gap_s: float) -> None:
        asyncio.get_running_loop().call_later(pause_s, self._event, number, gap_s)

    def _event(self, number: int, gap_s: float) -> None:
        self._transport.write(EVENTS[number] if number else HEAD + EVENTS[0])
        if number + 1 < NUM_EVENTS:
            self._later(number + 1, gap_s, gap_s)
        else:
            self._transport.write(EVENTS[-1])


def chunk(text: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def events() -> Iterator[bytes]:
    """Yield the events of a stream as vLLM does."""
    for number in range(NUM_EVENTS):
        reason = '"length"' if number == NUM_EVENTS - 1 else "null"
        choice = f'{{"index":0,"text":" token{number}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}'
        head = '{"id":"cmpl-bench","object":"text_completion","created":1,"model":"bench"'
        yield chunk(f'data: {head},"choices":[{choice}]}}\n\n'.encode())
    yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENTS = tuple(events())


async def engine_part() -> None:
    """Run the stub engine."""
    server = await asyncio.get_running_loop().create_server(StubEngine, PLACE, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# The stub scheduler.


class InTurn(scheduler_pb2_grpc.SchedulerServicer):
    """Sends each request to the next engine."""

    def __init__(self, urls: list[str]) -> None:
        """Store the engines' URLs."""
        self._instances = [
            common_pb2.Instance(instance_id=f"engine-{number}", engine_url=url, models=["bench"])
            for number, url in enumerate(urls)
        ]
        self._turn = 0

    async def Schedule(  # noqa: N802 - the wire's name
        self,
        request: scheduler_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleResponse],  # noqa: ARG002
    ) -> scheduler_pb2.ScheduleResponse:
        """Return the next engine."""
        self._turn += 1
        here = self._turn % len(self._instances)
        decision = common_pb2.Decision(
            request_id=request.request.request_id,
            instance=self._instances[here],
            policy="round_robin",
            forecast=common_pb2.Forecast(ttft_s=0.04, e2e_s=0.2, tpot_s=0.01, output_tokens=NUM_EVENTS),
            tag=common_pb2.Tag(median_tokens=NUM_EVENTS, estimator="client", confidence=1),
            next_best=[one for number, one in enumerate(self._instances) if number != here],
        )
        return scheduler_pb2.ScheduleResponse(decision=decision)

    def _unused(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Reject calls that the bench does not make."""
        raise NotImplementedError

    Generate = Explain = ListInstances = UsePolicy = _unused

    async def Release(  # noqa: N802 - the wire's name
        self,
        request: common_pb2.ReleaseRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[common_pb2.ReleaseRequest, common_pb2.ReleaseResponse],  # noqa: ARG002
    ) -> common_pb2.ReleaseResponse:
        """Ignore a release."""
        return common_pb2.ReleaseResponse(released=True)


async def scheduler_part() -> None:
    """Run the stub scheduler."""
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(InTurn(os.environ["BLOCK_BENCH_ENGINES"].split(",")), server)
    port = server.add_insecure_port(f"{PLACE}:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


PARTS = {"engine": engine_part, "scheduler": scheduler_part}

if __name__ == "__main__":
    main()
