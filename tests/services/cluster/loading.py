"""Bounded load on a gateway: a few clients, each with one request after the other, and what became of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.http.client import origin_of
from services.load.asking import Manner, body_of
from services.load.running import LoadLimits, LoadSender
from simulator.load_plan import Planned
from simulator.load_report import RequestResult
from tests.services.cluster.living import MODEL
from tests.services.waiting import PATIENCE_S

MOST = 5000  # requests, should nobody stop the clients
MANNER = Manner(model=MODEL, output="header")  # how long answers become only engines know, so the tagger is asked


@dataclass(slots=True, kw_only=True)
class Load:
    """What has ended so far, in that order."""

    results: list[RequestResult] = field(default_factory=list)
    num_sent: int = 0
    stopping: bool = False

    def served_since(self, start: int, instance: str | None = None) -> int:
        """How many have been served since there were so many results, by any instance or by one."""
        return sum(result.failure is None and instance in (None, result.instance) for result in self.results[start:])

    def failures(self) -> list[RequestResult]:
        """Those that did not complete."""
        return [result for result in self.results if result.failure is not None]


@asynccontextmanager
async def loaded(
    url: str, *, clients: int = 6, prompt_tokens: int = 24, output_tokens: int = 24, most: int = MOST
) -> AsyncIterator[Load]:
    """Keep a gateway busy while the block runs; at its end all that was sent has ended."""
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


def was_flowing_and_ended_clean(result: RequestResult) -> bool:
    """Tell whether a client had the beginning of its answer, and then an error of OpenAI's shape."""
    if result.failure != "error event" or result.ttft_s is None:
        return False
    return is_error_event(result.note)


def is_error_event(text: str) -> bool:
    """Tell whether a text is one event that tells of an engine's failure."""
    error = json.loads(text.removeprefix("data: "))["error"]
    return error.keys() == {"message", "type", "param", "code"} and error["type"] == "server_error"
