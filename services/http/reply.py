"""The client's side of a request: what it has been told so far, and so what can still be said."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from services.http.client import Headers
from services.http.errors import ApiError
from services.http.headers import REQUEST_ID

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class Client:
    """Tells a client a status and headers once, and its answer whole or piece by piece."""

    send: Send
    request_id: str  # as the client is to read it
    arrived_s: float = field(default_factory=time.monotonic)
    arrived_unix_s: float = field(default_factory=time.time)
    status: int = 0  # told; 0 as long as nothing is
    _ended: bool = False

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer in one piece."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def begin(self, status: int, headers: Headers) -> None:
        """Begin an answer."""
        self.status = status
        headers = [*headers, (REQUEST_ID, self.request_id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, piece: bytes) -> None:
        """Send more of it."""
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes) -> None:
        """Send the last of it."""
        self._ended = True
        await self.send({"type": "http.response.body", "body": piece, "more_body": False})

    async def refuse(self, refused: ApiError) -> None:
        """Say what went wrong: as the answer, or as the last event of one that has begun."""
        if self.status == 0:
            await self.answer(refused.status, refused.headers(), refused.body())
        elif not self._ended:
            await self.end(refused.event())
