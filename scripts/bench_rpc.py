"""Processor time of a gRPC call, by kind of server and by kind of client.

One server process serves the same methods three times, on three ports: `bare`, with handlers `wrapped` by hand, and
with our `interceptor`. One client process calls them in turns of some hundred calls, so that all variants see the same
load of the machine. It calls the bare server also by other clients: `own` is `services/rpc/grpc_channel.py`, and `h2`
the library of that name with just enough around it to send and receive messages on a stream. Messages are a small
PredictRequest and its response. All numbers are medians over the turns.

- `{server,client}_cpu_us.unary.{variant}`: processor time of the process, all threads, per unary call.
- `{server,client}_cpu_us.stream.{variant}`: the same per message there and back on one long-lived stream.
- `{server,client}_cpu_us.paced.{variant}`: the same with 5 ms between two messages, as at a few hundred decisions per
  second; less the processor time of the pauses alone.
- `server_overhead.{unary,stream}.{variant}`: the server's processor time, relative to the bare server.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvloop

# isort: off
import services  # noqa: F401 - configures gRPC before it is imported, as in every server of ours

# isort: on
import grpc
import h2.config
import h2.connection
import h2.events
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from scripts.report import report
from services.rpc.channels import bind_server, make_server
from services.rpc.grpc_call import PREFIX
from services.rpc.grpc_channel import GrpcChannel
from services.rpc.interceptor import CallInterceptor

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
VARIANTS = ("bare", "wrapped", "interceptor")
PACED_CALLS, PAUSE_S = 50, 0.005
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


Call = Callable[[], Awaitable[object]]


async def called(pid: int, ports: Sequence[int], turns: int, calls: int) -> list[dict[str, object]]:
    """Call all variants in turns."""
    async with AsyncExitStack() as stack:
        cases: dict[tuple[str, str], Call] = {}
        for variant, port in zip(VARIANTS, ports, strict=True):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{port}"))
            stub: Any = predictor_pb2_grpc.PredictorStub(channel)
            stream = stub.PredictStream()
            stack.callback(stream.cancel)
            cases["unary", variant] = partial(stub.Predict, REQUEST, timeout=10)
            cases["stream", variant] = partial(_there_and_back, stream)
        own = await stack.enter_async_context(GrpcChannel(f"{HOST}:{ports[0]}"))
        call = partial(own.call, f"/{SERVICE}/Predict", REQUEST, predictor_pb2.PredictResponse, timeout_s=10)
        cases["unary", "own"] = call
        cases["stream", "own"] = OwnStream(own).call
        by_library = await H2Stream.connected(ports[0])
        stack.callback(by_library.close)
        cases["stream", "h2"] = by_library.call
        seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(turns + 1):
            for (kind, variant), one in cases.items():
                taken = await _taken(pid, one, calls, 0.0)
                if turn:  # the first one warms up
                    seen.setdefault((kind, variant), []).append(taken)
            for variant in ("bare", "own", "h2"):
                paced = await _taken(pid, cases["stream", variant], PACED_CALLS, PAUSE_S)
                paused = await _taken(pid, _nothing, PACED_CALLS, PAUSE_S)
                if turn:
                    seen.setdefault(("paced", variant), []).append((paced[0] - paused[0], paced[1] - paused[1]))
    return _numbers(seen)


def _numbers(seen: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for (kind, variant), taken_s in seen.items():
        server_us, client_us = (1e6 * statistics.median(column) for column in zip(*taken_s, strict=True))
        numbers = [(f"server_cpu_us.{kind}.{variant}", server_us), (f"client_cpu_us.{kind}.{variant}", client_us)]
        results += [{"name": name, "value": value, "unit": "us", "n": len(taken_s)} for name, value in numbers]
        if kind != "paced" and variant in VARIANTS:
            overheads = [mine[0] / bare[0] for mine, bare in zip(taken_s, seen[kind, "bare"], strict=True)]
            name, value = f"server_overhead.{kind}.{variant}", statistics.median(overheads)
            results.append({"name": name, "value": value, "unit": "ratio", "n": len(taken_s)})
    return results


async def _taken(pid: int, call: Call, calls: int, pause_s: float) -> tuple[float, float]:
    """Return the processor time of server and client per call."""
    server_clock = ~pid << 3 | 2  # the number by which Linux knows another process's CPU clock
    server_s, client_s = time.clock_gettime(server_clock), time.process_time()
    for _ in range(calls):
        await call()
        if pause_s:
            await asyncio.sleep(pause_s)
    return (time.clock_gettime(server_clock) - server_s) / calls, (time.process_time() - client_s) / calls


async def _nothing() -> None:
    """Call no server."""


async def _there_and_back(stream: Any) -> None:
    await stream.write(REQUEST)
    await stream.read()


class OwnStream:
    """A stream by our client."""

    def __init__(self, channel: GrpcChannel) -> None:
        """Open it."""
        self._reply: asyncio.Future[bytes] | None = None
        self._call = channel.start_call(f"/{SERVICE}/PredictStream", self._take, self._end)

    async def call(self) -> predictor_pb2.PredictResponse:
        """Send a message, and wait for its reply."""
        self._reply = asyncio.get_running_loop().create_future()
        self._call.send(REQUEST.SerializeToString())
        return predictor_pb2.PredictResponse.FromString(await self._reply)

    def _take(self, message: bytes) -> None:
        if self._reply is not None:
            self._reply.set_result(message)

    def _end(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionError("the server ended the stream"))


class H2Stream(asyncio.Protocol):
    """A stream by the library h2."""

    @classmethod
    async def connected(cls, port: int) -> H2Stream:
        """Connect, and open the stream."""
        _, stream = await asyncio.get_running_loop().create_connection(cls, HOST, port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the headers."""
        self._transport = cast("asyncio.Transport", transport)
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self._connection.initiate_connection()
        self._stream_id = self._connection.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/PredictStream", ":authority": HOST}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        self._connection.send_headers(self._stream_id, list(headers.items()))
        self._transport.write(self._connection.data_to_send())
        self._partial = b""
        self._reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def call(self) -> predictor_pb2.PredictResponse:
        """Send a message, and wait for its reply."""
        self._reply = asyncio.get_running_loop().create_future()
        message = REQUEST.SerializeToString()
        self._connection.send_data(self._stream_id, PREFIX.pack(0, len(message)) + message)
        self._transport.write(self._connection.data_to_send())
        return predictor_pb2.PredictResponse.FromString(await self._reply)

    def data_received(self, data: bytes) -> None:
        """Take what has arrived; there is one reply at a time."""
        for event in self._connection.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self._connection.acknowledge_received_data(event.flow_controlled_length, self._stream_id)
                self._partial += event.data
        length = PREFIX.unpack_from(self._partial)[1] if len(self._partial) >= PREFIX.size else math.inf
        if len(self._partial) == PREFIX.size + length:
            reply, self._partial = self._partial[PREFIX.size :], b""
            self._reply.set_result(reply)
        if unsent := self._connection.data_to_send():
            self._transport.write(unsent)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


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
