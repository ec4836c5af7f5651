"""A request on its way through an emulated engine, as its client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.emulator.openai import ParsedRequest
from services.emulator.refusals import VllmError


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine: how many tokens there are, how many its client has got, whether more will come.

    While its task waits for `more`, `push` may send what is ready in its place; where that cannot be it says so, and
    the task is woken.
    """

    ask: ParsedRequest
    engine_id: str
    slot: int
    serial: int
    num_ready: int = 0
    num_sent: int = 0
    cached_tokens: int = 0
    is_over: bool = False
    failure: VllmError | None = None
    push: Callable[[], bool] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, num_ready: int) -> None:
        """Note how many tokens there are now."""
        self.num_ready = num_ready
        if self.push is None or not self.push():
            self.news.set()

    async def more(self, push: Callable[[], bool] | None = None) -> bool:
        """Wait for tokens that have to be sent; tell whether there are any, or no more will come."""
        self.push = push
        while self.num_ready <= self.num_sent and not self.is_over and self.failure is None:
            self.news.clear()
            await self.news.wait()
        self.push = None
        if self.failure is not None:
            raise self.failure
        return self.num_ready > self.num_sent
