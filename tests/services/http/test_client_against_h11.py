"""The HTTP/1.1 client beside h11: the same bytes, cut at the same places, must mean the same to both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.http.client import HttpClient
from services.http.connection import BrokenError, Connection
from services.http.origin import origin_of

REQUEST = b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n"
ORIGIN = origin_of("http://engine")
EOF = object()  # in place of a piece: the server closes the connection

# What both report of one exchange.
COMPLETE, INCOMPLETE, ERROR = "complete", "incomplete", "error"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a client makes of the bytes that follow one request."""

    result: str
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    is_reusable: bool = False


class FakeTransport(asyncio.Transport):
    """Keeps what is written, and notes that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def write(self, data: Any) -> None:
        """Ignore a request."""

    def abort(self) -> None:
        """Close."""
        self.is_closed = True

    def is_closing(self) -> bool:
        """Tell whether it is closed."""
        return self.is_closed

    def pause_reading(self) -> None:
        """Ignore flow control."""

    def resume_reading(self) -> None:
        """Ignore flow control."""


class KeptConnections(HttpClient):
    """Notes the connections that may be used again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Connection] = []

    def keep(self, connection: Connection) -> None:
        """Note a connection."""
        self.kept.append(connection)


def _normal(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Write a header as h11 does, which changes this one value to lower case."""
    return name, value.lower() if name == b"transfer-encoding" else value


async def by_the_client(exchanges: Sequence[Sequence[Any]]) -> list[Exchange]:
    """Feed the pieces of some exchanges on one connection to our client."""
    client = KeptConnections()
    connection, transport = Connection(client, ORIGIN, asyncio.get_running_loop()), FakeTransport()
    connection.connection_made(transport)
    seen = []
    for pieces in exchanges:
        connection.write(REQUEST, b"")
        for piece in pieces:
            if piece is EOF:
                transport.is_closed = True
                connection.connection_lost(None)
            elif not transport.is_closed:
                connection.data_received(piece)
        try:
            await connection.head(0.0)
            status, headers = connection.status, tuple(_normal(name, value) for name, value in connection.headers)
            body = b""
            while not connection.drained():
                body += await connection.read(0.0)
        except TimeoutError:
            return [*seen, Exchange(result=INCOMPLETE)]
        except BrokenError:
            return [*seen, Exchange(result=ERROR)]
        client.kept.clear()
        connection.release()
        is_reusable = bool(client.kept)
        seen.append(Exchange(result=COMPLETE, status=status, headers=headers, body=body, is_reusable=is_reusable))
        if not is_reusable:
            break
    return seen


def by_h11(exchanges: Sequence[Sequence[Any]]) -> list[Exchange]:
    """Feed the same pieces to h11."""
    connection = h11.Connection(h11.CLIENT)
    seen = []
    for pieces in exchanges:
        connection.send(h11.Request(method="GET", target="/", headers=[("host", "engine")]))
        connection.send(h11.EndOfMessage())
        exchange = _one_by_h11(connection, pieces)
        seen.append(exchange)
        if exchange.result != COMPLETE or not exchange.is_reusable:
            break
        connection.start_next_cycle()
    return seen


def _one_by_h11(connection: h11.Connection, pieces: Sequence[Any]) -> Exchange:
    status, headers, body, is_complete = 0, (), b"", False
    has_closed = False
    try:
        for piece in pieces:
            if is_complete:
                return Exchange(result=COMPLETE, status=status, headers=headers, body=body)  # more than was requested
            has_closed = has_closed or piece is EOF
            connection.receive_data(b"" if piece is EOF else piece)
            while not is_complete and (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    status, headers = event.status_code, tuple((bytes(n), bytes(v)) for n, v in event.headers)
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    is_complete = True
                elif isinstance(event, h11.ConnectionClosed):
                    return Exchange(result=ERROR)  # before a response
    except h11.RemoteProtocolError:
        return Exchange(result=ERROR)
    if not is_complete:
        return Exchange(result=INCOMPLETE)
    is_reusable = connection.their_state is h11.DONE and not connection.trailing_data[0] and not has_closed
    return Exchange(result=COMPLETE, status=status, headers=headers, body=body, is_reusable=is_reusable)


# Responses.

TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=8).map(lambda text: b"x-" + text.encode())
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12).map(str.encode) | st.sampled_from(
    [b"a b", b"a,  b", b"\xe9"]
)
HEADERS = st.lists(st.tuples(TOKENS, VALUES), max_size=3)
BODIES = st.binary(max_size=60) | st.just(b"data: {}\n\n" * 20)


def _lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(name + b": " + value + b"\r\n" for name, value in headers)


@st.composite
def chunked(draw: st.DrawFn) -> bytes:
    """A body in chunks, with extensions and trailers."""
    parts = []
    for piece in draw(st.lists(st.binary(min_size=1, max_size=20), max_size=4)):
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"000%x"])) % len(piece)
        extension = draw(st.sampled_from([b"", b"", b";a=b", b";c"]))
        parts.append(size + extension + b"\r\n" + piece + b"\r\n")
    return b"".join(parts) + b"0\r\n" + _lines(draw(HEADERS)) + b"\r\n"


@st.composite
def interim(draw: st.DrawFn) -> bytes:
    """Responses before the response: 100 Continue and the like."""
    statuses = draw(st.lists(st.sampled_from([100, 102, 103]), max_size=2))
    return b"".join(b"HTTP/1.1 %d Wait\r\n%s\r\n" % (status, _lines(draw(HEADERS))) for status in statuses)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, bool]:
    """A valid response, and whether it ends with the connection."""
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    status = draw(st.sampled_from([200, 200, 201, 204, 304, 404, 429, 500]))
    reason = draw(st.sampled_from([b"OK", b"", b"Not Found", b"\xe9"]))
    headers = draw(HEADERS)
    kept = [b"keep-alive", b"Keep-Alive"] if version == b"1.1" else []  # h11 does not reuse connections of HTTP/1.0
    connection = draw(st.sampled_from([None, None, b"close", *kept]))
    if connection is not None:
        headers.append((draw(st.sampled_from([b"connection", b"Connection"])), connection))
    until_close, body = False, b""
    framing = draw(st.sampled_from(["length", "length", "chunked", "close"]))
    if status in (204, 304):
        if status == 304 and draw(st.booleans()):
            headers.append((b"content-length", b"17"))  # of the body that a 200 would have
    elif framing == "length":
        body = draw(BODIES)
        headers.insert(draw(st.integers(0, len(headers))), (b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked" and version == b"1.1":
        body = draw(chunked())
        headers.append((b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"]))))
    else:
        body, until_close = draw(BODIES), True
    head = b"HTTP/%s %d %s\r\n" % (version, status, reason) + _lines(headers) + b"\r\n"
    return draw(interim()) + head + body, until_close


def cut(draw: st.DrawFn, data: bytes) -> list[Any]:
    """Cut bytes into pieces at random places, often into single bytes around one of them."""
    places = sorted(set(draw(st.lists(st.integers(1, max(1, len(data) - 1)), max_size=6))))
    bounds = [0, *places, len(data)]
    return [data[start:end] for start, end in pairwise(bounds) if end > start]


@st.composite
def valid_exchanges(draw: st.DrawFn) -> list[list[Any]]:
    """Some exchanges on one connection, each with its whole response."""
    exchanges = []
    for _ in range(draw(st.integers(1, 3))):
        data, until_close = draw(responses())
        exchanges.append(
            cut(draw, data) + ([EOF] if until_close or draw(st.sampled_from([False] * 9 + [True])) else [])
        )
    return exchanges


MORE = st.binary(min_size=1, max_size=9).filter(lambda more: more.strip(b"\r\n"))


@st.composite
def broken_exchanges(draw: st.DrawFn) -> list[list[Any]]:
    """A response that is cut off, goes on behind its end, or is wrong in one of many ways."""
    data, until_close = draw(responses())
    fault = draw(st.sampled_from(["truncated", "waiting", "more", "another"]))
    if fault in ("truncated", "waiting"):
        data = data[: draw(st.integers(0, len(data) - 1))]
        return [[*(cut(draw, data) if data else []), *([EOF] if fault == "truncated" else [])]]
    if until_close:
        return [[*cut(draw, data), EOF]]
    return [cut(draw, data + (draw(MORE) if fault == "more" else data))]


INVALID = (
    b"GARBAGE\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTX/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\nab",
    b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nab",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nname with space: 1\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n: 1\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nab\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\nabc\r\n0\r\n\r\n",
)


@st.composite
def invalid_exchanges(draw: st.DrawFn) -> list[list[Any]]:
    """An invalid response, possibly after a valid one, and the end of the connection."""
    first = draw(st.sampled_from([[], [[b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]]]))
    return [*first, [*cut(draw, draw(st.sampled_from(INVALID))), EOF]]


LIMITS = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def both(exchanges: Sequence[Sequence[Any]]) -> tuple[list[Exchange], list[Exchange]]:
    """Feed exchanges to both."""
    return asyncio.run(by_the_client(exchanges)), by_h11(exchanges)


@LIMITS
@given(valid_exchanges())
@example([[b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-status: 9\r\n\r\n"]])  # a trailer
def test_valid_responses_mean_the_same(exchanges: list[list[Any]]) -> None:
    """Status, headers, body, and whether the connection may be used for another request."""
    ours, theirs = both(exchanges)
    assert ours == theirs
    assert theirs[0].result == COMPLETE


@LIMITS
@given(broken_exchanges())
def test_responses_that_are_cut_off_or_go_on_mean_the_same(exchanges: list[list[Any]]) -> None:
    """What is missing is waited for, or is an error; what is there too much never becomes part of a response."""
    ours, theirs = both(exchanges)
    assert ours == theirs


@pytest.mark.parametrize("more", [b"\r", b"\n", b"\r\n\r\n"])
def test_line_breaks_behind_a_response_are_ignored(more: bytes) -> None:
    """The client's parser skips them before the next response, where h11 does not use the connection again."""
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    ours, theirs = both([[ok + more], [ok]])
    assert [one.is_reusable for one in theirs] == [False]
    assert [(one.status, one.body, one.is_reusable) for one in ours] == 2 * [(200, b"ok", True)]


@LIMITS
@given(invalid_exchanges())
def test_invalid_responses_are_errors_to_both(exchanges: list[list[Any]]) -> None:
    """Wherever they are cut, and whether or not a valid response came before."""
    ours, theirs = both(exchanges)
    assert ours == theirs
    assert theirs[-1].result == ERROR


def test_endless_headers_are_errors_to_both() -> None:
    """No server makes a client keep headers without end."""
    ours, theirs = both([[b"HTTP/1.1 200 OK\r\nx: ", *[b"a" * 10_000] * 20]])
    assert ours == theirs == [Exchange(result=ERROR)]
