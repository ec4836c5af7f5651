"""A request on its way through an emulated engine, as its client sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.emulator.openai import Ask
from services.emulator.refusals import RefusedError


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine: how many tokens are there for its client, and whether more will come."""

    ask: Ask
    engine_id: str
    slot: int
    serial: int
    num_ready: int = 0
    cached_tokens: int = 0
    is_over: bool = False
    failure: RefusedError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def more(self, num_seen: int) -> int:
        """Wait for tokens beyond those seen; return how many there are, the same number when no more will come."""
        while self.num_ready <= num_seen and not self.is_over and self.failure is None:
            self.news.clear()
            await self.news.wait()
        if self.failure is not None:
            raise self.failure
        return self.num_ready
