"""Waiting in tests for a condition, with a time-out that is long enough for a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0  # for one condition
LIMIT_S = 120.0  # of one test
PATIENT_SERVERS = {  # environment of servers that run with their default settings otherwise
    "BLOCK_SCHEDULE_S": "60", "BLOCK_CONNECT_S": "60", "BLOCK_SIDECAR_DEADLINE_MS": "20000",
    "BLOCK_TAGGER_DEADLINE_MS": "20000",
}  # fmt: skip


def run(test: Callable[[], Awaitable[None]], limit_s: float = LIMIT_S) -> None:
    """Run a test on its own event loop; a test that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(limited())


async def bound(bind: Callable[[], Awaitable[T]] | Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """Bind a port that a server had before; meanwhile another process may have it as any free one."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            result = bind()
            return await result if isinstance(result, Awaitable) else result
        except (OSError, RuntimeError):  # the latter by gRPC
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(0.1)


def wait_until(
    condition: Callable[[], object],
    within_s: float = PATIENCE_S,
    what: str | Callable[[], str] = "the condition of the test",
) -> None:
    """Check a condition repeatedly until it is true, in a test without an event loop."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"timed out: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]],
    within_s: float = PATIENCE_S,
    what: str = "the condition of the test",
) -> None:
    """Check a condition repeatedly until it is true."""
    deadline_s = time.monotonic() + within_s
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline_s, f"timed out: {what}"
        await asyncio.sleep(0.02)
