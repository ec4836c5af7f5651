"""Closed-loop load on a gateway: a few clients, each with one request after the other, and their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.http.origin import origin_of
from services.load.request_format import RequestFormat, body_of
from services.load.running import LoadLimits, LoadSender
from simulator.load_plan import Planned
from simulator.load_report import RequestResult
from tests.services.cluster.living import MODEL
from tests.services.waiting import PATIENCE_S

MOST = 5000  # requests, if the clients are not stopped
MANNER = RequestFormat(
    model=MODEL, output="header"
)  # only engines know the response lengths, so that the tagger is used


@dataclass(slots=True, kw_only=True)
class Load:
    """The results so far, in the order in which requests ended."""

    results: list[RequestResult] = field(default_factory=list)
    num_sent: int = 0
    stopping: bool = False

    def served_since(self, start: int, instance: str | None = None) -> int:
        """Count the requests served since there were this many results, by any instance or by one."""
        return sum(result.failure is None and instance in (None, result.instance) for result in self.results[start:])

    def failures(self) -> list[RequestResult]:
        """The results of requests that failed."""
        return [result for result in self.results if result.failure is not None]


@asynccontextmanager
async def loaded(
    url: str, *, clients: int = 6, prompt_tokens: int = 24, output_tokens: int = 24, most: int = MOST
) -> AsyncIterator[Load]:
    """Keep a gateway busy while the block runs; at its end all requests have ended."""
    load = Load()
    sender = LoadSender(origin_of(url), MANNER, LoadLimits(timeout_s=2 * PATIENCE_S))

    async def one_after_the_other() -> None:
        while not load.stopping and load.num_sent < most:
            load.num_sent += 1
            planned = Planned(
                request_id=str(load.num_sent), due_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens
            )
            result = RequestResult(plan=planned)
            await sender.send(planned, body_of(planned, MANNER), time.monotonic(), result)
            load.results.append(result)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(one_after_the_other())
            try:
                yield load
            finally:
                load.stopping = True
    finally:
        sender.close()
