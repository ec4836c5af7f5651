"""A request in an emulated engine, as its client's task sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.emulator.errors import VllmError
from services.emulator.openai import ParsedRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine: the tokens that are ready, those that are sent, and whether it is over.

    While its task waits in `more`, `push` may send ready tokens without waking it; where that is not possible `push`
    returns False, and the task is woken.
    """

    request: ParsedRequest
    engine_id: str
    slot: int
    serial: int
    arrived_s: float  # before the compilation of its grammar
    num_ready: int = 0
    num_sent: int = 0
    cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None  # of the reply
    is_over: bool = False
    failure: VllmError | None = None
    push: Callable[[], bool] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_ready(self, num_ready: int) -> None:
        """Update the number of ready tokens."""
        self.num_ready = num_ready
        if self.push is None or not self.push():
            self.changed.set()

    async def more(self, push: Callable[[], bool] | None = None) -> bool:
        """Wait for tokens to send; False where no more will come."""
        self.push = push
        while self.num_ready <= self.num_sent and not self.is_over and self.failure is None:
            self.changed.clear()
            await self.changed.wait()
        self.push = None
        if self.failure is not None:
            raise self.failure
        return self.num_ready > self.num_sent
