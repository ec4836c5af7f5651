"""The client of benches: requests in a closed loop, so many at a time, and what their answers took."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.running import Running
from scripts.stand_ins import COMPLETIONS, NUM_EVENTS
from services.http.client import HttpClient, Origin, origin_of, request_head
from services.http.sse import StreamReader

HEADERS = [(b"content-type", b"application/json")]
WAIT_S = 10.0  # longest, for anything
LIMIT_S = 120.0  # of one load
NONE_WAITING = b"\nblock_gateway_releases_waiting 0.0"


@dataclass(kw_only=True)
class LoadSample:
    """Times of requests, and the processor time that was taken for them where it was measured."""

    ttft_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def rate(self) -> float:
        """Requests a second."""
        return len(self.e2e_ms) / self.wall_s

    def cpu_ms(self) -> float:
        """Processor time per request."""
        return 1000 * self.cpu_s / len(self.e2e_ms)


async def load(
    client: HttpClient, urls: Sequence[str], bodies: Sequence[bytes], at_a_time: int, *, spread_s: float = 0.0
) -> LoadSample:
    """Send requests to servers in turn, so many at a time, and note their times; one that fails ends all.

    The first ones are sent over a while, so that requests that take equally long do not come in waves.
    """
    sample = LoadSample()
    origins = [origin_of(url) for url in urls]
    left = iter(enumerate(bodies))

    async def one_after_the_other(pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        for number, body in left:
            await ask(client, origins[number % len(origins)], body, sample)

    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for place in range(at_a_time):
                group.create_task(one_after_the_other(spread_s * place / at_a_time))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    sample.wall_s = time.perf_counter() - start_s
    return sample


async def ask(client: HttpClient, origin: Origin, body: bytes, sample: LoadSample) -> None:
    """Send one request and take its whole answer."""
    start_s = time.perf_counter()
    head = request_head(b"POST", origin, COMPLETIONS, HEADERS, len(body))
    connection = await client.send(origin, head, body, WAIT_S)
    reader = StreamReader()
    reader.feed(await connection.read(WAIT_S))
    first_s = time.perf_counter()
    while not connection.drained():
        reader.feed(await connection.read(WAIT_S))
    end_s = time.perf_counter()
    if connection.status != 200 or reader.num_data != NUM_EVENTS + 1:
        raise RuntimeError(f"an answer with status {connection.status} and {reader.num_data} events")
    connection.release()
    sample.ttft_ms.append(1000 * (first_s - start_s))
    sample.e2e_ms.append(1000 * (end_s - start_s))


async def load_through(
    client: HttpClient,
    router: Sequence[Running],
    bodies: Sequence[bytes],
    at_a_time: int,
    *,
    spread_s: float = 0.0,
    gateway: bool = True,
) -> LoadSample:
    """Send requests through a router, whose first process is asked, and note the processor time of all of it."""
    cpu_s = sum(part.cpu_s() for part in router)
    sample = await load(client, [router[0].url], bodies, at_a_time, spread_s=spread_s)
    if gateway:
        await settled(router[0])
    sample.cpu_s = sum(part.cpu_s() for part in router) - cpu_s
    return sample


async def settled(gateway: Running) -> None:
    """Wait until a gateway has told of all answers."""
    client, origin = HttpClient(), origin_of(gateway.url)
    for _ in range(200):
        _, text = await client.get(origin, b"/metrics", within_s=5)
        if NONE_WAITING in text:
            break
        await asyncio.sleep(0.005)
    client.close()


def quantile(values: Sequence[float], fraction: float) -> float:
    """Give the value below which so many lie."""
    if fraction == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]
