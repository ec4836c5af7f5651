"""One connection of the HTTP client: a request is written, its response is parsed and read with timeouts."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from services.http.headers import Headers
from services.http.origin import Origin
from services.security.handshakes import reason_in

READ_AHEAD_BYTES = 256 * 1024  # with more unread, reading from the socket pauses
JOIN_BYTES = 64 * 1024  # a body up to this is sent in one piece with its head
MAX_HEADER_BYTES = 64 * 1024


class ConnectError(ConnectionError):
    """The server could not be reached; it has received nothing of the request."""


class BrokenError(ConnectionError):
    """The connection ended, or was invalid, before the response was complete."""


class ReadInterruptedError(Exception):
    """The wait for more of a response was ended by `interrupt`; the response goes on."""


class ConnectionPool(Protocol):
    """Keeps connections between requests."""

    def keep(self, connection: Connection) -> None:
        """Keep a connection whose response has been read to its end."""

    def forget(self, connection: Connection) -> None:
        """Drop a connection that the server has closed."""


class Connection(asyncio.Protocol):
    """One connection, used by one request at a time: write, head, read until empty, release."""

    def __init__(self, pool: ConnectionPool, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to a pool, which keeps it between requests."""
        self.origin = origin
        self.status = 0
        self.headers: Headers = []
        self.has_received = False  # any byte of the response
        self.whole = False  # the response is complete
        self.idle_since_s = 0.0
        self.sent_s = 0.0  # monotonic; an event loop's own clock may tick in milliseconds
        self.last_byte_s = 0.0  # monotonic
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._in_use = False
        self._keep_alive = False
        self._head_done = False
        self._until_close = False
        self._header_bytes = 0
        self._num_unparsed = 0  # bytes received since the last header or part of the body
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._take: Callable[[bytes], None] | None = None
        self._paused = False
        self._error: ConnectionError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # Used by requests.

    def write(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        self.status, self.headers, self._header_bytes, self._num_unparsed = 0, [], 0, 0
        self.has_received = self.whole = self._head_done = self._until_close = False
        self._in_use = True
        if self._transport is None or self._error is not None:
            raise BrokenError("the connection is closed")
        if len(body) <= JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self.sent_s = time.monotonic()

    async def head(self, within_s: float) -> None:
        """Wait for the status and the headers."""
        while not self._head_done:
            await self._wait(within_s)

    async def read(self, within_s: float) -> bytes:
        """Wait for more of the body, and return all that has arrived; empty at its end."""
        while not self._pieces:
            if self.whole:
                return b""
            await self._wait(within_s)
        pieces, self._pieces, self._num_unread = self._pieces, [], 0
        self._resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def hand_over(self, take: Callable[[bytes], None], within_s: float) -> None:
        """Pass the body piece by piece to `take` as it arrives; return at its end, after at most `within_s`.

        Waking a task for every piece would cost more than a reader of long streams needs for it.
        """
        for piece in self._pieces:
            take(piece)
        self._pieces, self._num_unread, self._take = [], 0, take
        self._resume()
        try:
            while not self.whole:
                await self._wait(within_s)
        finally:
            self._take = None

    def drained(self) -> bool:
        """Tell whether the body has been read to its end."""
        return self.whole and not self._pieces

    async def read_all(self, within_s: float, max_bytes: int) -> bytes:
        """Read the body to its end; `within_s` limits the time between its pieces."""
        pieces = []
        num_bytes = 0
        while piece := await self.read(within_s):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise BrokenError(f"the response is longer than {max_bytes} bytes")
        return b"".join(pieces)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            cast("asyncio.Transport", self._transport).resume_reading()

    def release(self) -> None:
        """End the request: keep the connection if the response was read to its end, else close it."""
        if not self._in_use:
            return
        if self.whole and not self._pieces and self._keep_alive and self._error is None and not self.is_closing():
            self._in_use = False
            self._stop_timer()
            self.idle_since_s = self._loop.time()
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._in_use = False
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def interrupt(self) -> None:
        """End the wait of a reader with ReadInterruptedError; it may read on later."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ReadInterruptedError())

    def is_closing(self) -> bool:
        """Tell whether it is closed."""
        return self._transport is None or self._transport.is_closing()

    # Waiting. One timer serves all waits of a request: when it fires early, it is set again.

    async def _wait(self, within_s: float) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._due_s = self._loop.time() + within_s
        if self._timer is None or self._timer.when() > self._due_s:
            self._stop_timer()
            self._timer = self._loop.call_at(self._due_s, self._timed_out)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _timed_out(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._due_s:
            self._timer = self._loop.call_at(self._due_s, self._timed_out)
        else:
            self._waiter.set_exception(
                TimeoutError(f"{self.origin.host}:{self.origin.port} did not send anything in time")
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = BrokenError(f"{self.origin.host}:{self.origin.port} {message}")
        self._wake()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if not self._in_use or self.whole:
            self._fail("sent bytes that belong to no request")
            self._pool.forget(self)
            self.abort()
            return
        self.has_received = True
        self.last_byte_s = time.monotonic()
        try:
            self._num_unparsed += len(data)
            self._parser.feed_data(data)
            if self._num_unparsed > MAX_HEADER_BYTES:
                raise httptools.HttpParserError("a line is too long")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail("sent an invalid response")
            self.abort()
            return
        if self._num_unread > READ_AHEAD_BYTES and not self._paused and not self.whole:
            self._paused = True
            cast("asyncio.Transport", self._transport).pause_reading()
        if self._head_done and (self._take is None or self.whole):
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of a response without a length, or of one that is cut off."""
        if self._until_close and error is None:
            self.whole = True
        why = f": {reason_in(error)}" if isinstance(error, ssl.SSLError) else ""
        self._error = self._error or BrokenError(f"{self.origin.host}:{self.origin.port} closed the connection{why}")
        self._wake()
        self._stop_timer()
        self._pool.forget(self)

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Note that bytes follow a complete response: they are ignored, and the connection is not used again."""
        if self.whole:
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; a trailer is read and ignored."""
        self._num_unparsed = 0
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("too many headers")
        if not self._head_done:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note the status."""
        if self.whole:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # 100 Continue and the like
            return
        self._num_unparsed = 0
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        names = [name for name, _ in self.headers]
        self._until_close = (
            b"content-length" not in names and b"transfer-encoding" not in names and self.status not in (204, 304)
        )

    def on_body(self, piece: bytes) -> None:
        """Note a piece of the body, or pass it on."""
        if self.whole:
            return
        self._num_unparsed = 0
        if self._take is not None:
            self._take(piece)
            return
        self._pieces.append(piece)
        self._num_unread += len(piece)

    def on_message_complete(self) -> None:
        """Note that the response is complete."""
        if self.status < 200:
            self.headers, self._header_bytes = [], 0
        else:
            self.whole = True
