"""Processor time of a gRPC call: a bare server beside ours with its interceptor, and beside handlers wrapped by hand.

One server process serves the same methods three times, on three ports; one client process calls them in turns of some
hundred calls, so that all variants see the same load of the machine. Messages are a small PredictRequest and its
response. All numbers are medians over the turns.

- `{server,client}_cpu_us.unary.{variant}`: processor time of the process, all threads, per unary call.
- `{server,client}_cpu_us.stream.{variant}`: the same per message there and back on one long-lived stream.
- `server_overhead.{unary,stream}.{variant}`: the server's processor time, relative to the bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

# isort: off
import services  # noqa: F401 - configures gRPC before it is imported, as in every server of ours

# isort: on
import grpc
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from scripts.report import report
from services.rpc.channels import bind_server, make_server, open_channel
from services.rpc.interceptor import CallInterceptor

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
VARIANTS = ("bare", "wrapped", "interceptor")
SERVICE = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
REQUEST = predictor_pb2.PredictRequest(
    instance_id="instance-1",
    requests=[common_pb2.Request(request_id="request-1", model="m", prompt_tokens=500, max_tokens=1024)],
)
RESPONSE = predictor_pb2.PredictResponse(
    instance_id="instance-1",
    predictions=[predictor_pb2.Prediction(forecast=common_pb2.Forecast(ttft_s=0.2, e2e_s=7.0, tpot_s=0.03))],
)


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=30, help="turns of every variant")
    parser.add_argument("--calls", type=int, default=200, help="calls, or messages, of one turn")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    results = measured(arguments.turns, arguments.calls)
    report("rpc", results, as_json=arguments.json)


def measured(turns: int, calls: int) -> list[dict[str, object]]:
    """Run the server, and call it from this process."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            ports = [int(port) for port in (process.stdout.readline() if process.stdout else "").split()]
            return uvloop.run(called(process.pid, ports, turns, calls))
        finally:
            process.terminate()


async def called(pid: int, ports: Sequence[int], turns: int, calls: int) -> list[dict[str, object]]:
    """Call all variants in turns."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    channels = [open_channel(f"{HOST}:{port}") for port in ports]
    stubs: list[Any] = [predictor_pb2_grpc.PredictorStub(channel) for channel in channels]
    streams = [stub.PredictStream() for stub in stubs]

    async def unary(place: int) -> None:
        for _ in range(calls):
            await stubs[place].Predict(REQUEST, timeout=10)

    async def stream(place: int) -> None:
        for _ in range(calls):
            await streams[place].write(REQUEST)
            await streams[place].read()

    server_clock = ~pid << 3 | 2  # the number by which Linux knows another process's CPU clock
    for turn in range(turns + 1):
        for kind, call in (("unary", unary), ("stream", stream)):
            for place, variant in enumerate(VARIANTS):
                server_s, client_s = time.clock_gettime(server_clock), time.process_time()
                await call(place)
                taken = time.clock_gettime(server_clock) - server_s, time.process_time() - client_s
                if turn:  # the first one warms up
                    seen.setdefault((kind, variant), []).append(taken)
    for one, channel in zip(streams, channels, strict=True):
        one.cancel()
        await channel.close()
    results: list[dict[str, object]] = []
    for (kind, variant), taken_s in seen.items():
        server_us, client_us = (1e6 / calls * statistics.median(column) for column in zip(*taken_s, strict=True))
        overheads = [mine[0] / bare[0] for mine, bare in zip(taken_s, seen[kind, "bare"], strict=True)]
        for name, value, unit in (
            (f"server_cpu_us.{kind}.{variant}", server_us, "us"),
            (f"client_cpu_us.{kind}.{variant}", client_us, "us"),
            (f"server_overhead.{kind}.{variant}", statistics.median(overheads), "ratio"),
        ):
            results.append({"name": name, "value": value, "unit": unit, "n": len(taken_s)})
    return results


# The server.


async def predict(request: Any, context: Any) -> predictor_pb2.PredictResponse:  # noqa: ARG001
    """Respond to one request."""
    return RESPONSE


async def predict_stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: ARG001
    """Respond to each request of a stream."""
    async for _ in requests:
        yield RESPONSE


async def serve() -> None:
    """Serve all variants, print their ports, and continue."""
    parse, write = predictor_pb2.PredictRequest.FromString, predictor_pb2.PredictResponse.SerializeToString
    bare: dict[str, Any] = {
        "Predict": grpc.unary_unary_rpc_method_handler(predict, parse, write),
        "PredictStream": grpc.stream_stream_rpc_method_handler(predict_stream, parse, write),
    }
    servers = []
    for variant in VARIANTS:
        interceptor = CallInterceptor(1024, CollectorRegistry(), [SERVICE])
        server = make_server(max_message_bytes=2**24, interceptors=(interceptor,) if variant == "interceptor" else ())
        handlers = bare
        if variant == "wrapped":
            handlers = {name: interceptor.guard(f"/{SERVICE}/{name}", handler) for name, handler in bare.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        servers.append((server, bind_server(server, HOST, 0)))
        await server.start()
    print(*(port for _, port in servers), flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server, _ in servers))


if __name__ == "__main__":
    main()
