"""uvicorn's protocol behind limits: connections, heads that are too long or too slow, clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from services.http.errors import HttpError
from services.http.headers import Headers
from services.http.limits import (
    HEADER_TIMEOUT,
    HEADERS_TOO_LARGE,
    INVALID_HTTP,
    SLOW_READER,
    TOO_MANY_CLIENT_CONNECTIONS,
    URI_TOO_LONG,
    ConnectionTable,
    HttpLimits,
    Refusals,
    client_of,
)

MAX_TARGET_BYTES = 8192  # of a request line
MAX_PIPELINED = 64  # requests that wait for the response to an earlier one
LINGER_S = 2.0  # for a client to read a refusal while it still sends
MAX_LINGERING = 64  # connections beyond the limit that get a reply
REST_S = 10.0  # for the rest of a body whose request has its response
CALLBACKS = (
    "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete",
)  # fmt: skip
READ_BYTES = 4096  # that a slow reader takes each time


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionGuard:
    """What the connections of one server share."""

    limits: HttpLimits
    refusals: Refusals
    connections: ConnectionTable
    error: type[HttpError]

    def refusal(self, code: str) -> HttpError:
        """Make the reply to what is refused by the protocol."""
        limits = self.limits
        status, message = {
            HEADERS_TOO_LARGE: (
                431,
                f"the headers may have at most {limits.max_header_bytes} bytes, and be {limits.max_headers} at most",
            ),
            URI_TOO_LONG: (414, f"the target of the request may have at most {MAX_TARGET_BYTES} bytes"),
            HEADER_TIMEOUT: (408, f"the head of the request did not arrive within {limits.header_s:g} s"),
            TOO_MANY_CLIENT_CONNECTIONS: (429, "this client has too many open connections"),
            INVALID_HTTP: (400, "this is not HTTP/1.1"),
        }.get(code, (503, "too many connections are open"))
        return self.error(status, message, code=code)


class BodyAfterUpgrade:
    """Reads on behind the head of a request that offers an upgrade, as clients for HTTP/2 do, as if it did not."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        """Call the protocol, but not for the head."""
        self._protocol = protocol
        self._is_behind_head = False

    def parser_for(self, framing: Headers) -> httptools.HttpRequestParser:
        """Return a parser that expects a body with these headers, and then further requests."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % pair for pair in framing))
        self._is_behind_head = True
        return parser

    def __getattr__(self, name: str) -> Any:
        """Pass a callback of the parser on."""
        if name not in CALLBACKS:
            raise AttributeError(name)
        callback = getattr(self._protocol, name)

        def passed_on(*parts: bytes) -> None:
            if self._is_behind_head:
                callback(*parts)

        return passed_on


class GuardedProtocol(HttpToolsProtocol):
    """One connection; after a refusal it reads nothing more and is closed."""

    def __init__(self, guard: ConnectionGuard, *, config: Config, server_state: ServerState, **options: Any) -> None:
        """Share a guard with the other connections of the server."""
        super().__init__(config=config, server_state=server_state, **options)
        self._guard = guard
        self._limits = guard.limits
        self._client_key = ""
        self._is_refused = False
        self._violation = ""  # that a callback of the parser found
        self._in_head = self._in_body = False
        self._num_headers = self._head_bytes = 0
        self._num_unparsed = 0  # bytes since the last target, header or part of a body
        self._num_received = 0  # of a head that is not complete
        self._num_begun = 0  # messages, in the bytes received last
        self._timer: asyncio.TimerHandle | None = None  # of a head, of the rest of a body, or of lingering
        self._unread_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and refuse one too many."""
        super().connection_made(transport)
        guard = self._guard
        self._client_key = client_of(self.client[0]) if self.client else ""
        code = guard.connections.opened(self._client_key)
        if not code:
            self._wait(self._limits.header_s, self._head_is_late)
        elif len(guard.connections) > self._limits.max_connections + MAX_LINGERING:
            self._is_refused = True
            guard.refusals.note(code, self._client_key)
            transport.abort()
        else:
            self._refuse(code)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._guard.connections.closed(self._client_key)
        self._unset_keepalive_if_required()
        self._stop_waiting()
        self._stop_watching()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._num_unparsed += len(data)
        begins_in_body, self._num_begun = self._in_body, 0
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._violation or INVALID_HTTP)
            return
        if self._in_head and not begins_in_body and self._num_begun <= 1:  # all of it belongs to this head
            self._num_received += len(data)
        if max(self._num_unparsed, self._num_received) > self._limits.max_header_bytes:
            self._refuse(HEADERS_TOO_LARGE if self._in_head or self._in_body else INVALID_HTTP)
        elif self._timer is None and (self._in_head or (self._num_unparsed and not self._in_body)):
            self._wait(self._limits.header_s, self._head_is_late)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:  # is not served: the client goes on with HTTP/1.1
                data = data[upgrade.args[0] :]
                if framing := self._framing():
                    self.parser = BodyAfterUpgrade(self).parser_for(framing)
            else:
                return

    def pause_writing(self) -> None:
        """Watch a client that does not read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self._stop_watching()

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        super().on_message_begin()
        self._in_head = True
        self._num_headers = self._head_bytes = self._num_received = 0
        self._num_begun += 1

    def on_url(self, url: bytes) -> None:
        """Note a piece of the target."""
        self._num_unparsed = 0
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            self._violate(URI_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; trailers count, and are ignored."""
        self._num_unparsed = 0
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.max_header_bytes or self._num_headers > self._limits.max_headers:
            self._violate(HEADERS_TOO_LARGE)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that a body begins, and serve the request."""
        self._in_head, self._in_body, self._num_unparsed, self._num_received = False, True, 0, 0
        self._stop_waiting()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._violate(INVALID_HTTP)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note a piece of the body."""
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete; with an offer to upgrade, the parser does not see its body."""
        if self.parser.should_upgrade() and self._framing():
            return
        self._in_body, self._num_unparsed = False, 0
        self._stop_waiting()
        super().on_message_complete()

    def _framing(self) -> Headers:
        """Return the headers that say where the body of the request ends, if it has one."""
        found = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        return [] if found == [(b"content-length", b"0")] else found

    def _violate(self, code: str) -> None:
        """Stop the parser."""
        self._violation = code
        raise ValueError(code)

    # Called when a response is complete, or by timers.

    def on_response_complete(self) -> None:
        """Wait for the next request, for the rest of this one's body, or for the client to read a last response."""
        super().on_response_complete()
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self._watch_reader()
        elif self._in_body and self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self._wait(REST_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also where its client has not read all."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _head_is_late(self) -> None:
        self._timer = None
        if self._in_head or self._num_unparsed:
            self._refuse(HEADER_TIMEOUT)
        else:  # nothing came
            self._guard.refusals.note(HEADER_TIMEOUT, self._client_key)
            self.transport.close()

    def _refuse(self, code: str) -> None:
        """Reply with an error and close; an earlier request, if any, has its response first."""
        self._is_refused = True
        self._stop_waiting()
        self._guard.refusals.note(code, self._client_key)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline and cycle.more_body:
                self.transport.abort()
                return
            if cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        error = self._guard.refusal(code)
        body = error.body()
        head = [STATUS_LINE[error.status]]
        for name, value in (*error.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")):
            head += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join((*head, b"\r\n", body)))
        self._linger()

    def _linger(self) -> None:
        """Close after a while: a connection that is closed before all is read takes the reply with it."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(LINGER_S, self.transport.abort)

    def _watch_reader(self) -> None:
        self._stop_watching()
        self._num_unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._limits.slow_reader_s, self._reader_is_late)

    def _reader_is_late(self) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() <= self._num_unread - READ_BYTES:
            self._watch_reader()
            return
        self._guard.refusals.note(SLOW_READER, self._client_key)
        self.transport.abort()

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
