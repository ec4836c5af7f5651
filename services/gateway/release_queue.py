"""The ends of requests, reported to schedulers in the background."""

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

MAX_CALLS = 16  # at the same time
ATTEMPTS = 4
PAUSES = Backoff(first_s=0.4, max_s=2.0, random=random.random)  # between attempts


class ReleaseQueue:
    """A bounded queue of releases; those that cannot be delivered are counted and logged."""

    def __init__(
        self,
        deliver: Callable[[common_pb2.ReleaseRequest], Awaitable[bool]],
        *,
        max_waiting: int,
        delivered: Counter,
        lost: Counter,
    ) -> None:
        """Deliver by calling `deliver` until it returns True."""
        self._call = deliver
        self._max_waiting = max_waiting
        self._delivered = delivered
        self._lost = lost
        self._waiting: deque[common_pb2.ReleaseRequest] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_losing = False
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        """Return the number of releases that are not delivered yet."""
        return len(self._waiting) + len(self._tasks)

    def put(self, release: common_pb2.ReleaseRequest) -> None:
        """Queue a release; a full queue drops the oldest, whose reservation expires first."""
        if len(self._waiting) >= self._max_waiting:
            self._lose(self._waiting.popleft(), "the queue is full")
        self._waiting.append(release)
        if len(self._tasks) < MAX_CALLS:
            task = self._loop.create_task(self._deliver())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def deliver(self, release: common_pb2.ReleaseRequest) -> None:
        """Deliver a release at once; queue it where that fails."""
        is_delivered = False
        try:
            is_delivered = await self._call(release)
        finally:
            if is_delivered:
                self._delivered.inc()
            else:
                self.put(release)

    async def flush(self, within_s: float) -> None:
        """Wait until the queue is empty; releases that are left after `within_s` are lost."""
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
                is_delivered = await self._attempt(release)
            except asyncio.CancelledError:
                self._lose(release, "the gateway stopped")
                raise
            if is_delivered:
                self._delivered.inc()
                self._is_losing = False
            else:
                self._lose(release, "no scheduler accepted it")

    async def _attempt(self, release: common_pb2.ReleaseRequest) -> bool:
        for attempt in range(ATTEMPTS - 1):
            if await self._call(release):
                return True
            await asyncio.sleep(PAUSES.pause_s(attempt))
        return await self._call(release)

    def _lose(self, release: common_pb2.ReleaseRequest, why: str) -> None:
        self._lost.inc()
        level = logging.DEBUG if self._is_losing else logging.WARNING  # only the first of a series is a warning
        self._is_losing = True
        log_event(log, level, "release lost", request_id=release.request_id, instance_id=release.instance_id, why=why)
