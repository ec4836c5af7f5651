"""What comes from a client: its body, and the news that it has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, cast

from services.http.client import Headers
from services.http.errors import ApiError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

BODY_S = 60


class ClientLeftError(Exception):
    """Nobody is there any more to answer."""


async def received(headers: Headers, receive: Receive, most_bytes: int) -> bytes:
    """Receive a body, up to the limit."""
    too_long = ApiError(413, f"the body may have at most {most_bytes} bytes")
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    if int(length) > most_bytes:  # digits only: the server's parser has seen to that
        raise too_long
    try:
        async with asyncio.timeout(BODY_S):
            return await _pieces(receive, most_bytes, too_long)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S} s") from None


async def _pieces(receive: Receive, most_bytes: int, too_long: ApiError) -> bytes:
    pieces = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeftError
        piece: bytes = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > most_bytes:
            raise too_long
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def while_client_stays(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do what there is to do for a client whose body is here; end it at once with ClientLeftError when it leaves."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    here, left = True, False

    def gone(_: asyncio.Task[Any]) -> None:
        nonlocal left
        if here:
            left = True
            task.cancel()

    watch: asyncio.Task[Any] = asyncio.create_task(cast("Coroutine[Any, Any, Any]", receive()))
    watch.add_done_callback(gone)
    try:
        await work
    except asyncio.CancelledError:
        if not left:
            raise
        task.uncancel()
        raise ClientLeftError from None
    finally:
        here = False
        watch.cancel()
