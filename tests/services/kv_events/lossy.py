"""A network between a publisher of KV events and its subscriber that loses, repeats and reorders batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio


@asynccontextmanager
async def lossy_network(publisher: str, endpoint: str, seed: int, share: float = 0.15) -> AsyncIterator[dict[str, int]]:
    """Forward from a publisher to those who subscribe at another endpoint; yield the counts of faults."""
    context, draw = zmq.asyncio.Context(), random.Random(seed)
    faults = dict.fromkeys(("lost", "repeated", "reordered"), 0)
    incoming, outgoing = context.socket(zmq.SUB), context.socket(zmq.PUB)
    incoming.subscribe(b"")
    incoming.connect(publisher)
    outgoing.bind(endpoint)

    async def forward() -> None:
        late: list[list[bytes]] = []
        while True:
            frames = await incoming.recv_multipart()
            fault = draw.choices((*faults, ""), (share, share, share, max(0.0, 1 - 3 * share)))[0]
            if fault:
                faults[fault] += 1
            if fault == "reordered":
                late.append(frames)
                continue
            for _ in range({"lost": 0, "repeated": 2}.get(fault, 1)):
                await outgoing.send_multipart(frames)
            while late and draw.random() < 0.5:
                await outgoing.send_multipart(late.pop())

    task = asyncio.create_task(forward())
    try:
        yield faults
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)
