"""Waiting in tests: for something to become so, and never for ever, though a busy machine may take its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0  # for one thing to happen
LIMIT_S = 120.0  # of one test


def run(test: Callable[[], Awaitable[None]], limit_s: float = LIMIT_S) -> None:
    """Run a test on a loop of its own; one that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(limited())


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]],
    within_s: float = PATIENCE_S,
    what: str = "what the test waits for",
) -> None:
    """Look again and again until something is so."""
    deadline_s = time.monotonic() + within_s
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        await asyncio.sleep(0.02)
