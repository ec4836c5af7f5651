"""What traces cost the gateway: processor time per request without tracing, and with a share of the requests sampled.

Gateways that differ only in their sampler take turns, before the same stand-in engines that answer at once and the same
stand-in scheduler, 16 requests concurrently; a collector in this process takes the spans by OTLP. A sampled request has
three spans at the gateway: its own, the decision's and the leg's. A number is the median over the rounds, of the
processor time (user and system) of the gateway's process, its exporting thread included.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import grpc
import uvloop
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from scripts.bench_requests import PLACE, PROMPT_BYTES, request_body, text_of
from scripts.load_client import load_through
from scripts.processes import Running, block_serving, stand_in
from scripts.report import report
from services.http.client import HttpClient

NUM_ENGINES = 4
AT_A_TIME = 16
WARM_UP = 200
SHARES = {"off": None, "0": 0.0, "1_percent": 0.01, "100_percent": 1.0}


def main() -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="of all gateways")
    parser.add_argument("--requests", type=int, default=1000, help="per round and gateway")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        collector = Collector()
        address = stack.enter_context(collecting(collector))
        engines = [stack.enter_context(stand_in("engine")) for _ in range(NUM_ENGINES)]
        scheduler = stack.enter_context(stand_in("scheduler", *(engine.url for engine in engines)))
        gateways = {}
        for name, share in SHARES.items():
            flags = () if share is None else ("--otlp-traces-endpoint", address)
            sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": str(share)}
            with mock.patch.dict(os.environ, {} if share is None else sampler):
                place = f"{PLACE}:{scheduler.port}"
                gateways[name] = stack.enter_context(block_serving("gateway", "--scheduler", place, *flags))
        results = uvloop.run(measured(gateways, arguments.requests, arguments.rounds))
        for gateway in gateways.values():
            gateway.process.terminate()
            gateway.process.wait()  # it sends its last spans
    num_all = arguments.requests * arguments.rounds
    results.append({"name": "spans_received", "value": collector.num_spans, "unit": "spans", "n": num_all})
    report("tracing", results, as_json=arguments.json)


class Collector:
    """Counts the spans that it receives."""

    def __init__(self) -> None:
        """Start without any."""
        self.num_spans = 0

    def Export(  # noqa: N802 - the wire names it
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans."""
        del context
        self.num_spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting(collector: Collector) -> Iterator[str]:
    """Serve OTLP while the block runs; the context value is the endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # without types
    register(collector, server)
    port = server.add_insecure_port(f"{PLACE}:0")
    server.start()
    try:
        yield f"http://{PLACE}:{port}"
    finally:
        server.stop(None)


async def measured(gateways: dict[str, Running], num: int, rounds: int) -> list[dict[str, object]]:
    """Send the same requests through each gateway in turn."""
    client = HttpClient()
    body = request_body(text_of(random.Random(0), PROMPT_BYTES))
    cpu_ms: dict[str, list[float]] = {name: [] for name in gateways}
    for gateway in gateways.values():
        await load_through(client, [gateway], [body] * WARM_UP, AT_A_TIME)
    for _ in range(rounds):
        for name, gateway in gateways.items():
            sample = await load_through(client, [gateway], [body] * num, AT_A_TIME)
            cpu_ms[name].append(sample.cpu_ms())
    client.close()
    return [
        {
            "name": f"cpu_ms_per_request.{name}",
            "value": statistics.median(values),
            "unit": "ms",
            "n": num * rounds,
        }
        for name, values in cpu_ms.items()
    ]


if __name__ == "__main__":
    main()
