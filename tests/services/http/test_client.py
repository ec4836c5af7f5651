"""The HTTP client against regular and faulty servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest.mock import create_autospec

import pytest

from services.http.client import HttpClient
from services.http.connection import BrokenError, ConnectError, Connection
from services.http.headers import request_head
from services.http.origin import Origin, origin_of
from tests.ports import free_port
from tests.services.placement.scripted_connection import virtual_clock
from tests.services.waiting import run

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[tuple[Origin, HttpClient]]:
    """Run a server, and a client beside it."""

    async def handled(reader: Reader, writer: Writer) -> None:
        try:
            await serve(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(handled, "127.0.0.1", 0)
    client = HttpClient(keep_s=30.0)
    async with listening:
        yield origin_of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"), client
        client.close()


async def ask(client: HttpClient, origin: Origin, body: bytes = b"hello", within_s: float = 10.0) -> tuple[int, bytes]:
    """Send a request and read its whole response."""
    head = request_head(b"POST", origin, b"/x", [(b"content-type", b"text/plain")], len(body))
    connection = await client.send(origin, head, body, within_s)
    try:
        return connection.status, await connection.read_all(within_s, 2**20)
    finally:
        connection.release()


async def request(reader: Reader) -> bytes:
    """Read a request's head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    return head + await reader.readexactly(length)


OK = b"HTTP/1.1 200 OK\r\n"
RESPONSES = {
    "length": (OK + b"content-length: 2\r\n\r\nok", (200, b"ok")),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1;x=y\r\nk\r\n0\r\nt: r\r\n\r\n", (200, b"ok")),
    "until closed": (OK + b"\r\nok", (200, b"ok")),
    "after 100": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 2\r\n\r\nok", (200, b"ok")),
    "nothing": (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
    "empty": (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", (503, b"")),
}


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize("at_once", [True, False])
def test_responses_of_every_form(kind: str, at_once: bool) -> None:
    """Responses with a length, in chunks, or up to the end of the connection, in one piece or byte by byte."""
    sent, read = RESPONSES[kind]

    async def serve(reader: Reader, writer: Writer) -> None:
        await request(reader)
        for piece in [sent] if at_once else [sent[place : place + 1] for place in range(len(sent))]:
            writer.write(piece)
            await writer.drain()

    async def test() -> None:
        async with server(serve) as (origin, client):
            assert await ask(client, origin) == read

    run(test)


def test_a_request_on_the_wire() -> None:
    """A request has its host, its headers and its length, whatever the size of its body."""
    seen: list[bytes] = []

    async def serve(reader: Reader, writer: Writer) -> None:
        while True:
            seen.append(await request(reader))
            writer.write(OK + b"content-length: 0\r\n\r\n")

    async def test() -> None:
        async with server(serve) as (origin, client):
            for body in (b"hello", b"x" * 300_000):
                await ask(client, Origin(scheme="http", host=origin.host, port=origin.port, prefix="/p"), body)
                host = f"{origin.host}:{origin.port}".encode()
                head, _, rest = seen[-1].partition(b"\r\n\r\n")
                assert head.split(b"\r\n") == [
                    b"POST /p/x HTTP/1.1",
                    b"host: " + host,
                    b"content-type: text/plain",
                    b"content-length: %d" % len(body),
                ]
                assert rest == body

    run(test)


def test_connections_are_kept() -> None:
    """One connection serves many requests, one at a time; it sends small pieces at once."""
    num_connections = 0

    async def serve(reader: Reader, writer: Writer) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            await request(reader)
            writer.write(OK + b"content-length: 2\r\n\r\nok")

    async def test() -> None:
        async with server(serve) as (origin, client):
            for _ in range(5):
                assert await ask(client, origin) == (200, b"ok")
            assert num_connections == 1
            connection = await client.send(origin, request_head(b"GET", origin, b"/", [], 0), b"", 30.0)
            own = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.abort()

    run(test)


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    """A server may close a kept connection just as it is used again: the request is repeated."""
    num_connections = 0

    async def serve(reader: Reader, writer: Writer) -> None:
        nonlocal num_connections
        num_connections += 1
        await request(reader)
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        if num_connections == 1:
            await request(reader)  # and close the connection

    async def test() -> None:
        async with server(serve) as (origin, client):
            assert await ask(client, origin) == (200, b"ok")
            assert await ask(client, origin) == (200, b"ok")
            assert num_connections == 2

    run(test)


BROKEN = {
    "no word": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncont",
    "half a body": OK + b"content-length: 10\r\n\r\nhalf",
    "half a chunk": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nab",
    "bad chunk": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "no HTTP": b"220 ready\r\n\r\n",
    "endless head": OK + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
    "too much": OK + b"content-length: 2000000\r\n\r\n" + b"x" * 2_000_000,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_responses(kind: str) -> None:
    """An incomplete or invalid response is an error, never a short response."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(BROKEN[kind])

    async def test() -> None:
        async with server(serve) as (origin, client):
            with pytest.raises(BrokenError):
                await ask(client, origin)

    run(test)


@pytest.mark.parametrize("sent", [b"", OK, OK + b"content-length: 10\r\n\r\nhalf"])
def test_timeouts(sent: bytes) -> None:
    """A silent server costs no more than the timeout."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(sent)
        await reader.read()

    async def test() -> None:
        async with server(serve) as (origin, client):
            with pytest.raises(TimeoutError):
                await ask(client, origin, within_s=0.05)

    run(test)


def test_a_timeout_counts_from_every_piece() -> None:
    """The pause counts, not the whole; a shorter timeout after a longer one applies too."""
    num_pieces, pause_s, within_s = 8, 0.3, 1.0

    async def test() -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(HttpClient(), origin_of("http://a"), loop)
        connection.connection_made(create_autospec(asyncio.Transport, instance=True))
        connection.write(b"GET / HTTP/1.1\r\n\r\n", b"")
        loop.call_later(pause_s, connection.data_received, OK + b"content-length: 100\r\n\r\n")
        await connection.head(30.0)
        for number in range(num_pieces):
            loop.call_later((number + 1) * pause_s, connection.data_received, b"x")
        for _ in range(num_pieces):
            assert await connection.read(within_s) == b"x"
        assert loop.time() == pytest.approx((num_pieces + 1) * pause_s)
        with pytest.raises(TimeoutError):
            await connection.read(within_s)
        assert loop.time() == pytest.approx((num_pieces + 1) * pause_s + within_s)

    with virtual_clock() as loop:
        loop.run_until_complete(test())


@pytest.mark.parametrize("end", ["", "length", "break", "silence"])
def test_a_body_that_is_handed_over(end: str) -> None:
    """Pieces are passed on as they arrive, in order; the call returns at the end, or raises."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(OK + (b"content-length: 7\r\n\r\nab" if end == "length" else b"content-length: 900\r\n\r\nab"))
        for piece in (b"cd", b"efg"):
            await writer.drain()
            writer.write(piece)
        if end == "":
            writer.write(b"x" * 893)
        elif end == "break":
            writer.close()
        await reader.read()

    async def test() -> None:
        async with server(serve) as (origin, client):
            connection = await client.send(origin, request_head(b"GET", origin, b"/", [], 0), b"", 30.0)
            taken: list[bytes] = []
            if end in ("break", "silence"):
                with pytest.raises(BrokenError if end == "break" else TimeoutError):
                    await connection.hand_over(taken.append, 2.0 if end == "silence" else 30.0)
            else:
                await connection.hand_over(taken.append, 30.0)
                assert connection.drained()
            assert b"".join(taken).startswith(b"abcdefg")
            connection.release()

    run(test)


def test_unreachable_servers() -> None:
    """A refused connection and an impossible name differ from a broken response."""

    async def test() -> None:
        client = HttpClient()
        for url in (f"http://127.0.0.1:{free_port()}", f"http://{'x' * 64}:1"):
            with pytest.raises(ConnectError, match="cannot be reached"):
                await ask(client, origin_of(url))

    run(test)


def test_unread_data_is_not_buffered() -> None:
    """The server waits for a client that does not read."""
    num_sent = 0
    stuck = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        nonlocal num_sent
        await request(reader)
        writer.write(OK + b"\r\n")
        try:
            for num_sent in range(2000):  # noqa: B007 - used below
                writer.write(b"x" * 65_536)
                async with asyncio.timeout(0.3):
                    await writer.drain()
        except TimeoutError:
            stuck.set()
            raise ConnectionError from None

    async def test() -> None:
        async with server(serve) as (origin, client):
            connection = await client.send(origin, request_head(b"GET", origin, b"/", [], 0), b"", 10.0)
            await stuck.wait()
            assert num_sent < 500
            while len(await connection.read(30.0)) > 0:
                pass
            connection.abort()

    run(test)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a", Origin(scheme="http", host="a", port=80)),
        ("https://A:1/x/", Origin(scheme="https", host="a", port=1, prefix="/x")),
        ("http://[::1]:8", Origin(scheme="http", host="::1", port=8)),
    ],
)
def test_urls(url: str, origin: Origin) -> None:
    """Usual URLs are parsed."""
    assert origin_of(url) == origin
    assert origin_of("http://[::1]:8").host_header == b"[::1]:8"


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://u:p@a", "http://a?x", "http://a:x", "http://a/ b"]
)
def test_bad_urls(url: str) -> None:
    """Other strings are refused."""
    with pytest.raises(ValueError, match=r"URL|must have"):
        origin_of(url)
