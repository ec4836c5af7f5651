"""Limits of HTTP servers over real connections: each has its own refusal, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.http import application, guarded_protocol
from services.http.application import JSON, Application, Call
from services.http.limits import SETTINGS, ConnectionTable, HttpLimits, Refusals, client_of
from services.http.server import answering, listening
from tests.services.waiting import run, until

LOCAL = "127.0.0.1"
EVENTS = [(b"content-type", b"text/event-stream")]
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Server(Application):
    """Replies at once, echoes bodies, and streams for ever."""

    def __init__(self, **limits: Any) -> None:
        """Serve with some limits."""
        self.registry = CollectorRegistry()
        super().__init__(limits=HttpLimits(**limits), registry=self.registry)
        self.port = 0
        self.writers: list[Writer] = []  # of clients
        self.go_on = asyncio.Event()
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.cancelled = asyncio.Event()
        self.routes = {
            "/health": {"GET": self._health},
            "/echo": {"POST": self._echo},
            "/waits": {"GET": self._waits},
            "/endless": {"GET": self._endless},
            "/large": {"GET": self._large},
        }

    def num(self, code: str) -> float:
        """Return how many refusals of a kind were counted."""
        return self.registry.get_sample_value("block_http_refused_total", {"reason": code}) or 0.0

    async def _health(self, call: Call) -> None:
        await call.reply(200, JSON, b"{}")

    async def _echo(self, call: Call) -> None:
        body = await self.body_of(call, 100)
        self.headers.append(list(call.headers))
        await call.reply(200, JSON, body)

    async def _waits(self, call: Call) -> None:
        await self.go_on.wait()
        await call.reply(200, JSON, b"waited")

    async def _endless(self, call: Call) -> None:
        await call.start(200, EVENTS)
        await call.receive()  # the request's own end
        watch = asyncio.ensure_future(call.receive())
        with suppress(asyncio.CancelledError):
            while not watch.done():
                await call.write(b"data: " + b"x" * 10_000 + b"\n\n")
                await asyncio.sleep(0)
        watch.cancel()
        self.cancelled.set()

    async def _large(self, call: Call) -> None:
        await call.reply(200, [(b"connection", b"close")], b"x" * 20_000_000)


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[Server]:
    """Run a server."""
    app = Server(**limits)
    with listening(LOCAL, 0) as listener:
        async with answering(app, listener, 0.0):
            app.port = listener.getsockname()[1]
            try:
                yield app
            finally:
                for writer in app.writers:
                    writer.transport.abort()
                await asyncio.sleep(0)


async def connected(app: Server) -> tuple[Reader, Writer]:
    """Open a connection, which is closed with the server."""
    reader, writer = await asyncio.open_connection(LOCAL, app.port)
    app.writers.append(writer)
    return reader, writer


async def reply(reader: Reader) -> tuple[int, dict[str, str], bytes]:
    """Read one reply."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def refusal(app: Server, *pieces: bytes) -> tuple[int, str]:
    """Send bytes that are refused with a reply that closes the connection; return status and code."""
    reader, writer = await connected(app)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    status, headers, body = await reply(reader)
    assert headers["connection"] == "close"
    assert await reader.read() == b""
    return status, json.loads(body)["error"]["code"]


async def is_served(app: Server) -> bool:
    """Return whether a client is served."""
    reader, writer = await connected(app)
    writer.write(GET)
    try:
        status, _, _ = await reply(reader)
    finally:
        writer.transport.abort()
    return status == 200


HEAD = b"GET /health HTTP/1.1\r\n"
TOO_LARGE = (
    (431, "headers_too_large", (HEAD + b"x: %s\r\n\r\n" % (b"y" * 5000),)),
    (431, "headers_too_large", (HEAD + b"x: y\r\n" * 21 + b"\r\n",)),
    (431, "headers_too_large", (HEAD + b"x: ", b"y" * 3000, b"y" * 3000)),
    (431, "headers_too_large", (b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 21,)),
    (414, "uri_too_long", (b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 9000),)),
    (414, "uri_too_long", (b"GET /", b"a" * 5000, b"a" * 5000)),
    (400, "invalid_http", (b"\x16\x03\x01\x00\r\n\r\n",)),
    (400, "invalid_http", (b"\r\n" * 4096,)),
    (400, "invalid_http", (b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",)),
)


def test_long_heads_are_refused() -> None:
    """Headers, targets and lines have limits, however they are sent; each refusal is counted."""

    async def test() -> None:
        async with served(max_header_bytes=4096, max_headers=20) as app:
            for status, code, pieces in TOO_LARGE:
                before = app.num(code)
                assert await refusal(app, *pieces) == (status, code), pieces
                assert app.num(code) == before + 1
            assert await is_served(app)

    run(test)


def test_lines_of_a_body_are_limited() -> None:
    """What describes a chunk is limited as headers are."""

    async def test() -> None:
        async with served(max_header_bytes=4096) as app:
            reader, writer = await connected(app)
            writer.write(b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n")
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"1;" + b"y" * 5000)
            assert (await reply(reader))[0] == 431

    run(test)


def test_a_head_has_a_deadline() -> None:
    """A head that does not end is refused; a connection that sends nothing is closed, and one that waits is not."""

    async def test() -> None:
        async with served(header_s=0.1) as app:
            assert await refusal(app, HEAD) == (408, "header_timeout")
            reader, _ = await connected(app)
            assert await reader.read() == b""
            reader, writer = await connected(app)
            writer.write(GET)
            assert (await reply(reader))[0] == 200
            writer.write(b"\r\n")  # would keep a connection for ever
            assert (await reply(reader))[0] == 408
            assert app.num("header_timeout") == 3
            assert await is_served(app)

    run(test)


def test_a_body_has_a_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that arrives too slowly is refused, although its total time is not over."""
    monkeypatch.setattr(application, "FIRST_BODY_S", 0.1)

    async def test() -> None:
        async with served(min_body_bytes_per_s=100) as app:
            reader, writer = await connected(app)
            writer.write(b"POST /echo HTTP/1.1\r\ncontent-length: 90\r\n\r\n{")
            status, _, body = await reply(reader)
            assert (status, json.loads(body)["error"]["code"]) == (408, "body_timeout")
            assert app.num("body_timeout") == 1
            assert await is_served(app)

    run(test)


def test_the_rest_of_a_refused_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on sending what has been refused loses its connection."""
    monkeypatch.setattr(guarded_protocol, "REST_S", 0.1)

    async def test() -> None:
        async with served() as app:
            reader, writer = await connected(app)
            writer.write(b"POST /echo HTTP/1.1\r\ncontent-length: 101\r\n\r\n{")
            assert (await reply(reader))[0] == 413
            assert app.num("request_too_large") == 1
            with suppress(ConnectionError):
                assert await reader.read() == b""

    run(test)


def test_connections_have_limits() -> None:
    """One connection too many is refused, in all and of one client; a closed one makes room."""

    async def test() -> None:
        for limits, expected in (
            ({"max_connections": 2}, (503, "too_many_connections")),
            ({"max_connections_per_client": 2}, (429, "too_many_client_connections")),
        ):
            async with served(**limits) as app:
                pairs = [await connected(app) for _ in range(2)]
                for reader, writer in pairs:
                    writer.write(GET)
                    assert (await reply(reader))[0] == 200
                assert await refusal(app) == expected
                assert app.num(expected[1]) == 1
                pairs[0][1].transport.abort()

                async def is_served_again(app: Server = app) -> bool:
                    with suppress(ConnectionError, asyncio.IncompleteReadError):
                        return await is_served(app)
                    return False

                await until(is_served_again)
                pairs[1][1].transport.abort()

    run(test)


def test_refused_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some refusals at a time, connections are closed without a reply."""
    monkeypatch.setattr(guarded_protocol, "MAX_LINGERING", 1)

    async def test() -> None:
        async with served(max_connections=1) as app:
            pairs = [await connected(app) for _ in range(2)]
            assert (await reply(pairs[1][0]))[0] == 503
            reader, _ = await connected(app)
            with suppress(ConnectionError):
                assert await reader.read() == b""

    run(test)


def test_a_client_that_does_not_read_is_left() -> None:
    """A stream that nobody reads is cancelled, and a reply that nobody reads is given up."""

    async def test() -> None:
        async with served(slow_reader_s=0.2) as app:
            for path in (b"/endless", b"/large"):
                reading = socket.socket()
                reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reading.connect((LOCAL, app.port))
                reading.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
                num = app.num("slow_reader") + 1
                await until(lambda num=num: app.num("slow_reader") == num)
                reading.close()
            await app.cancelled.wait()
            assert await is_served(app)

    run(test)


def test_a_slow_client_that_reads_is_served() -> None:
    """A client that takes longer than the deadline for the whole, and reads all the time, gets everything."""

    async def test() -> None:
        async with served(slow_reader_s=0.3) as app:
            reader, writer = await connected(app)
            writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            received = 0
            while piece := await reader.read(2**20):
                received += len(piece)
                await asyncio.sleep(0.03)
            assert received == 20_000_000
            assert app.num("slow_reader") == 0

    run(test)


def test_garbage_behind_a_request_spares_its_reply() -> None:
    """The reply comes whole, and then the connection is closed."""

    async def test() -> None:
        async with served() as app:
            reader, writer = await connected(app)
            writer.write(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n\x00garbage\r\n\r\n")
            await until(lambda: app.num("invalid_http") == 1)
            app.go_on.set()
            status, _, body = await reply(reader)
            assert (status, body) == (200, b"waited")
            assert await reader.read() == b""

    run(test)


def test_waiting_requests_of_a_connection_have_a_limit() -> None:
    """Of too many requests sent at once some are answered, and the connection is closed."""

    async def test() -> None:
        async with served() as app:
            reader, writer = await connected(app)
            writer.write(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n" + GET * 200)
            await until(lambda: app.num("invalid_http") == 1)
            app.go_on.set()
            received = await reader.read()
            assert received.count(b"HTTP/1.1 200") == 1 + guarded_protocol.MAX_PIPELINED

    run(test)


def test_upgrades_and_trailers_are_ignored() -> None:
    """A client that offers another protocol goes on with HTTP/1.1; a trailer is no header of the request."""

    async def test() -> None:
        async with served() as app:
            reader, writer = await connected(app)
            offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
            writer.write(b"POST /echo HTTP/1.1\r\n" + offer + b"content-length: 2\r\n\r\nhi" + GET)
            assert (await reply(reader))[2] == b"hi"
            assert (await reply(reader))[2] == b"{}"
            writer.write(b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nx-late: 1\r\n\r\n")
            assert (await reply(reader))[2] == b"hi"
            assert all(name != b"x-late" for name, _ in app.headers[-1])

    run(test)


def test_refusals_are_logged_by_their_setting_and_seldom(caplog: pytest.LogCaptureFixture) -> None:
    """A flood of one kind is one line, which names the setting; another kind has its own."""
    refusals = Refusals()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            refusals.note("headers_too_large", "192.0.2.1")
        refusals.note("slow_reader")
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [one["reason"] for one in fields] == ["headers_too_large", "slow_reader"]
    assert fields[0]["setting"] == "max_header_bytes, max_headers"
    assert fields[0]["client"] == "192.0.2.1"


def test_servers_of_a_process_count_together() -> None:
    """Two servers with one registry share the counter, which has every kind from the start."""
    registry = CollectorRegistry()
    for _ in range(2):
        Refusals(registry).note("slow_reader")
    assert registry.get_sample_value("block_http_refused_total", {"reason": "slow_reader"}) == 2
    assert all(registry.get_sample_value("block_http_refused_total", {"reason": code}) is not None for code in SETTINGS)


def test_clients_are_counted_by_address_or_network() -> None:
    """An IPv6 client has all addresses of its network; a mapped address is IPv4; nothing is left of closed ones."""
    assert client_of("192.0.2.1") == "192.0.2.1"
    assert client_of("2001:db8:1:2:3:4:5:6") == client_of("2001:db8:1:2::9") == "2001:db8:1:2::"
    assert client_of("2001:db8:1:3::9") != client_of("2001:db8:1:2::9")
    assert client_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert client_of("fe80::1%eth0") == "fe80::"
    assert client_of("no: address") == "no: address"
    table = ConnectionTable(HttpLimits(max_connections=9, max_connections_per_client=1))
    assert [table.opened(name) for name in ("a", "b", "a")] == ["", "", "too_many_client_connections"]
    for name in ("a", "a", "b"):
        table.closed(name)
    assert (len(table), table._by_client) == (0, {})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_headers": 0}, "max_headers"),
        ({"max_header_bytes": 10}, "max_header_bytes"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_connections_per_client": 0}, "max_connections_per_client"),
        ({"min_body_bytes_per_s": 0}, "min_body_bytes_per_s"),
        ({"header_s": 0.0}, "header_s"),
        ({"slow_reader_s": float("nan")}, "slow_reader_s"),
        ({"max_json_depth": 3}, "max_json_depth"),
        ({"max_json_depth": 513}, "max_json_depth"),
    ],
)
def test_impossible_limits_are_refused(options: dict[str, Any], field: str) -> None:
    """An impossible limit is refused by its name."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        HttpLimits(**options)
