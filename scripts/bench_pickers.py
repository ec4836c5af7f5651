"""Many active endpoint pickers over many instances: processor time per request, and how evenly they place together.

The pickers are processes started by their command, the sidecars stand-ins in one other process, `--engines-per-sidecar`
of them behind one port: they count reservations as real ones do, but simulate nothing. This process speaks for the
proxies: it opens a stream for each request at one picker after the other, shows headers and body, and after a while the
response. Requests arrive as a Poisson process. Everything is on loopback, on the same cores.

- `cpu_ms_per_request.{pickers}`: processor time (user and system) of all pickers per request, less what they take idle.
- `idle_cores.{pickers}`: processor time of all pickers per second while no request comes.
- `answer_ms.{pickers}.p50|p99`: from showing the last part of a request to the answer.
- `excess.{pickers}`: by how many requests the fullest instance was above the mean when a request was placed there, the
  largest over all requests; 1 is as even as can be, and pickers that do not know of each other have more.
- `excess.{pickers}.blind`: the same for requests that the pickers place in turn by `round_robin`, each by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

import services  # noqa: F401 - sets options of gRPC, which it reads when it is imported

# isort: split
import grpc
import uvloop

from protos.envoy.v3 import external_processor_pb2 as wire
from protos.envoy.v3 import external_processor_pb2_grpc
from scripts.bench_requests import MODEL, PLACE, text_of
from scripts.load_client import quantile
from scripts.processes import Running, block_serving, instance_flags, sidecars_running
from scripts.report import report
from tests.services.endpoint_picker.running import ENDPOINT, header_map

STAY_S = 2.0  # from an answer to the end of the response
IDLE_S = 5.0
WARM_UP = 20
BLIND = "round_robin"
RESPONSE = (
    b'{"choices": [{"text": "Hi", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'
)


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--policy", default="block")
    parser.add_argument("--instances", type=int, default=256)
    parser.add_argument("--pickers", type=int, action="append", help="Repeatable; 1 and 8 by default.")
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--engines-per-sidecar", type=int, default=16)
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    for num in arguments.pickers or [1, 8]:
        for policy in (arguments.policy, BLIND):
            results += measured(arguments, num, policy)
    report("pickers", results, as_json=arguments.json)


@dataclass(kw_only=True)
class PickerLoad:
    """What requests to pickers met."""

    answer_ms: list[float] = field(default_factory=list)
    under_way: Counter[str] = field(default_factory=Counter)  # by endpoint
    excess: float = 0.0


def measured(arguments: argparse.Namespace, num: int, policy: str) -> list[dict[str, object]]:
    """Run one number of pickers with one policy."""
    with ExitStack() as stack:
        sidecars = stack.enter_context(sidecars_running(arguments.instances, arguments.engines_per_sidecar))
        engines = [f"http://127.0.{1 + place // 250}.{1 + place % 250}:8000" for place in range(arguments.instances)]
        flags = [*instance_flags(sidecars, engines), "--policy", policy, "--no-secure-serving", "--schedule-s", "10"]
        flags += ["--sidecar-deadline-ms", "5000"]  # all share the cores of this machine
        pickers = [stack.enter_context(block_serving("picker", *flags)) for _ in range(num)]
        load, cpu_s, idle = uvloop.run(loaded(pickers, arguments))
    n = arguments.requests
    excess = {"value": load.excess, "unit": "requests", "n": n}
    if policy == BLIND:
        return [{"name": f"excess.{num}.blind", **excess}]
    return [
        {"name": f"cpu_ms_per_request.{num}", "value": 1000 * cpu_s / n, "unit": "ms", "n": n},
        {"name": f"idle_cores.{num}", "value": idle, "unit": "cores", "n": num},
        {"name": f"answer_ms.{num}.p50", "value": quantile(load.answer_ms, 0.5), "unit": "ms", "n": n},
        {"name": f"answer_ms.{num}.p99", "value": quantile(load.answer_ms, 0.99), "unit": "ms", "n": n},
        {"name": f"excess.{num}", **excess},
    ]


async def loaded(pickers: Sequence[Running], arguments: argparse.Namespace) -> tuple[PickerLoad, float, float]:
    """Send the requests; return what they met, the pickers' processor time for them, and that per idle second."""
    rng = random.Random(0)
    body = json.dumps({"model": MODEL, "prompt": text_of(rng, arguments.prompt_bytes), "max_tokens": 200}).encode()
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(
                    f"{PLACE}:{picker.port}",
                    options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
                )
            )
            for picker in pickers
        ]
        stubs = [external_processor_pb2_grpc.ExternalProcessorStub(channel) for channel in channels]
        warm_up = PickerLoad()
        await asyncio.gather(*(send(stub, body, warm_up, len(pickers)) for _ in range(WARM_UP) for stub in stubs))
        before_s = cpu_of(pickers)
        await asyncio.sleep(IDLE_S)
        idle = (cpu_of(pickers) - before_s) / IDLE_S
        load, before_s, start_s = PickerLoad(), cpu_of(pickers), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for stub in itertools.islice(itertools.cycle(stubs), arguments.requests):
                await asyncio.sleep(rng.expovariate(arguments.rate))
                group.create_task(send(stub, body, load, arguments.instances))
        took_s = time.perf_counter() - start_s
        return load, cpu_of(pickers) - before_s - idle * took_s, idle


def cpu_of(pickers: Sequence[Running]) -> float:
    """Return the processor time of all pickers so far."""
    return sum(picker.cpu_s() for picker in pickers)


async def send(
    stub: external_processor_pb2_grpc.ExternalProcessorAsyncStub, body: bytes, load: PickerLoad, num_instances: int
) -> None:
    """Show one request, and after a while its response, as a proxy does."""
    call = stub.Process()
    headers = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    await call.write(wire.ProcessingRequest(request_headers=wire.HttpHeaders(headers=header_map(headers))))
    start_s = time.perf_counter()
    await call.write(wire.ProcessingRequest(request_body=wire.HttpBody(body=body, end_of_stream=True)))
    answer = await read(call)
    load.answer_ms.append(1000 * (time.perf_counter() - start_s))
    mutation = answer.request_headers.response.header_mutation
    endpoints = next(one.header.raw_value for one in mutation.set_headers if one.header.key == ENDPOINT)
    endpoint = endpoints.decode().partition(",")[0]
    load.under_way[endpoint] += 1
    load.excess = max(load.excess, load.under_way[endpoint] - load.under_way.total() / num_instances)
    while not (await read(call)).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass
    await asyncio.sleep(STAY_S)
    replied = header_map({":status": "200", "content-type": "application/json"})
    await call.write(wire.ProcessingRequest(response_headers=wire.HttpHeaders(headers=replied)))
    await read(call)
    await call.write(wire.ProcessingRequest(response_body=wire.HttpBody(body=RESPONSE, end_of_stream=True)))
    await read(call)
    await call.done_writing()
    load.under_way[endpoint] -= 1


async def read(
    call: grpc.aio.StreamStreamCall[wire.ProcessingRequest, wire.ProcessingResponse],
) -> wire.ProcessingResponse:
    """Return the next message."""
    message = await call.read()
    if not isinstance(message, wire.ProcessingResponse) or message.HasField("immediate_response"):
        raise RuntimeError(f"a picker refuses a request: {message}")
    return message


if __name__ == "__main__":
    main()
