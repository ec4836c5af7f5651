"""The ends of requests, told to schedulers in the background."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

from protos.block.v1 import common_pb2
from scheduler.backoff import Backoff
from services.logs import log_event

log = logging.getLogger(__name__)

AT_ONCE = 16
ATTEMPTS = 4
PAUSES = Backoff(first_s=0.4, max_s=2.0, random=random.random)  # between attempts


class ReleaseQueue:
    """A bounded queue: nobody waits for it, and what it cannot deliver is counted and logged."""

    def __init__(
        self,
        tell: Callable[[common_pb2.ReleaseRequest], Awaitable[bool]],
        *,
        most: int,
        told: Counter,
        lost: Counter,
    ) -> None:
        """Deliver by calling `tell` until it says True."""
        self._tell = tell
        self._most = most
        self._told = told
        self._lost = lost
        self._waiting: deque[common_pb2.ReleaseRequest] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._losing = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        """How many have not been told yet."""
        return len(self._waiting) + len(self._tasks)

    def put(self, release: common_pb2.ReleaseRequest) -> None:
        """Tell it soon."""
        if len(self._waiting) >= self._most:
            self._lose(self._waiting.popleft(), "too many are waiting")  # the oldest expire by themselves first
        self._waiting.append(release)
        if len(self._tasks) < AT_ONCE:
            task = self._loop.create_task(self._deliver())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def flush(self, within_s: float) -> None:
        """Wait until all is told; what is not by then is lost."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._waiting:
            self._lose(self._waiting.popleft(), "the gateway stopped")

    async def _deliver(self) -> None:
        while self._waiting:
            release = self._waiting.popleft()
            try:
                told = await self._told_in_the_end(release)
            except asyncio.CancelledError:
                self._lose(release, "the gateway stopped")
                raise
            if told:
                self._told.inc()
                self._losing = False
            else:
                self._lose(release, "no scheduler took it")

    async def _told_in_the_end(self, release: common_pb2.ReleaseRequest) -> bool:
        for attempt in range(ATTEMPTS - 1):
            if await self._tell(release):
                return True
            await asyncio.sleep(PAUSES.pause_s(attempt))
        return await self._tell(release)

    def _lose(self, release: common_pb2.ReleaseRequest, why: str) -> None:
        self._lost.inc()
        level = logging.DEBUG if self._losing else logging.WARNING  # one line tells it, the counter tells how many
        self._losing = True
        log_event(log, level, "release lost", request_id=release.request_id, instance_id=release.instance_id, why=why)
