"""The client of benches: it sends requests in a closed loop with a fixed concurrency, and measures their latencies."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.bench_requests import NUM_EVENTS
from scripts.processes import Running
from services.http.client import HttpClient
from services.http.headers import request_head
from services.http.origin import Origin, origin_of
from services.http.paths import COMPLETIONS
from services.http.sse import StreamReader

HEADERS = [(b"content-type", b"application/json")]
WAIT_S = 10.0  # longest, for anything
LIMIT_S = 120.0  # of one load
NONE_WAITING = b"\nblock_gateway_releases_waiting 0.0"


@dataclass(kw_only=True)
class LoadSample:
    """The latencies of requests, and the processor time that they took where it was measured."""

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


async def load(
    client: HttpClient, urls: Sequence[str], bodies: Sequence[bytes], at_a_time: int, *, spread_s: float = 0.0
) -> LoadSample:
    """Send requests to servers in turn, `at_a_time` concurrently, and measure them; the first failure ends the load.

    The first ones are spread over `spread_s`, so that requests that take equally long do not arrive in waves.
    """
    sample = LoadSample()
    origins = [origin_of(url) for url in urls]
    left = iter(enumerate(bodies))

    async def send_next(pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        for number, body in left:
            await send(client, origins[number % len(origins)], body, sample)

    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            for place in range(at_a_time):
                group.create_task(send_next(spread_s * place / at_a_time))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    sample.wall_s = time.perf_counter() - start_s
    return sample


async def send(client: HttpClient, origin: Origin, body: bytes, sample: LoadSample) -> None:
    """Send one request and read its whole response."""
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
        raise RuntimeError(f"a response with status {connection.status} and {reader.num_data} events")
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
    """Send requests to the first process of a router, and measure the processor time of all its processes."""
    cpu_s = sum(part.cpu_s() for part in router)
    sample = await load(client, [router[0].url], bodies, at_a_time, spread_s=spread_s)
    if gateway:
        await all_released(router[0])
    sample.cpu_s = sum(part.cpu_s() for part in router) - cpu_s
    return sample


async def all_released(gateway: Running) -> None:
    """Wait until a gateway has released all requests."""
    client, origin = HttpClient(), origin_of(gateway.url)
    for _ in range(200):
        _, text = await client.get(origin, b"/metrics", within_s=5)
        if NONE_WAITING in text:
            break
        await asyncio.sleep(0.005)
    client.close()


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile of some values."""
    if fraction == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]
