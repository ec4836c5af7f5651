"""An endpoint picker over a cluster's instances, kept busy by a proxy: requests to engines, and some that go wrong."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx

from protos.envoy.v3 import external_processor_pb2_grpc
from services.cluster.child import Child
from tests.services.endpoint_picker.running import Proxy, chosen, completion, head

LOCAL = "127.0.0.1"
STREAM = "text/event-stream"
FLAGS = (
    "--port", "0", "--metrics-port", "0", "--no-secure-serving", "--policy", "slo", "--poll-s", "0.2",
    "--sidecar-deadline-ms", "2000", "--schedule-s", "20",
)  # fmt: skip
LEAVES, ELSEWHERE, CONFUSED = 5, 7, 11  # of so many requests one is such


@asynccontextmanager
async def picker_over(instances: Path) -> AsyncIterator[Child]:
    """Run `block serve picker` over a list of instances."""
    child = Child("picker", "picker", *FLAGS, "--instances-file", str(instances))
    await child.start()
    try:
        yield child
    finally:
        await child.stop()


@asynccontextmanager
async def asked(picker: Child, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Keep a picker busy while the block runs."""

    async def one_after_the_other() -> None:
        async with grpc.aio.insecure_channel(f"{LOCAL}:{picker.port}") as channel:
            stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
            for count in itertools.count(1):
                with suppress(httpx.HTTPError, grpc.aio.AioRpcError):
                    await one_request(stub, client, count)
                await asyncio.sleep(0.05)

    task = asyncio.create_task(one_after_the_other())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def one_request(stub: Any, client: httpx.AsyncClient, count: int) -> None:
    """Have the endpoint of one request chosen, and pass the engine's stream through the picker."""
    one = Proxy(call=stub.Process())
    headers = {**head(), **({"x-slo-ttft-ms": "1", "x-block-when-late": "shed"} if count % 3 == 0 else {})}
    body = completion(prompt=f"{count} tell me more " * 30, max_tokens=8, stream=True)
    await one.send_headers({**headers, "x-block-objective": "unheard-of"})
    if count % CONFUSED == 0:
        await one.send_headers(headers)  # again, which the protocol does not allow
        await one.read()
    await one.send_body(body)
    first = await one.read()
    if first.HasField("immediate_response"):
        return
    await one.read()  # the body
    endpoint = chosen(first)[0]
    async with client.stream("POST", f"http://{endpoint}/v1/completions", content=body) as reply:
        await one.respond(reply.status_code, STREAM, "10.9.9.9:1" if count % ELSEWHERE == 0 else endpoint)
        await one.read()
        async for piece in reply.aiter_bytes():
            await one.respond_body(piece, end=False)
            await one.read()
            if count % LEAVES == 0:
                one.call.cancel()
                return
    await one.respond_body(b"")
    await one.read()
    await one.finish()
