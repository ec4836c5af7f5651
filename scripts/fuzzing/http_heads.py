"""A target behind HTTP: whatever bytes come over a connection to a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.server import ServerState

from scripts.fuzzing.http_bytes import in_pieces, request_of
from scripts.fuzzing.http_stubs import CLIENT, END_S, QUIET_S, STATUSES, answers
from scripts.fuzzing.inputs import mutated
from scripts.fuzzing.targets import FoundError, require
from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.http.application import Application
from services.http.guarded_protocol import ConnectionGuard, GuardedProtocol
from services.http.limits import ConnectionTable, HttpLimits
from services.rpc.settings import ServerSettings
from tests.services.gateway.stubs import Call, engines


class Wire(asyncio.Transport):
    """The transport of a connection that is no socket."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        """Belong to a protocol."""
        super().__init__({"peername": CLIENT, "sockname": ("127.0.0.1", 80)})
        self.written = bytearray()
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: Any) -> None:
        """Keep what is sent."""
        if not self._is_closing:
            self.written += data

    def writelines(self, pieces: Any) -> None:
        """Keep what is sent."""
        for piece in pieces:
            self.write(piece)

    def can_write_eof(self) -> bool:
        """Return that it can."""
        return True

    def write_eof(self) -> None:
        """Do nothing."""

    def get_write_buffer_size(self) -> int:
        """Return that all is sent."""
        return 0

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self._is_closing

    def pause_reading(self) -> None:
        """Do nothing: the rest has been sent already."""

    def resume_reading(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Close soon, as sockets do."""
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close


class Replies:
    """Reads replies; a byte that belongs to none is an error of the parser."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self.statuses: list[int] = []
        self.num_whole = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Read bytes."""
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        """Note a status."""
        self.statuses.append(self._parser.get_status_code())

    def on_message_complete(self) -> None:
        """Note an end."""
        self.num_whole += 1


class HttpHeadTarget:
    """Sends bytes in pieces over connections to a gateway, and now and then over real ones."""

    name = "http_head"

    def __init__(self, app: Application, port: int, calls: list[Call]) -> None:
        """Make the protocol that servers have, with small limits."""
        self._app = app
        self._port = port
        self._calls = calls
        limits = HttpLimits(max_header_bytes=4096, max_headers=20, header_s=60.0)
        self._guard = ConnectionGuard(
            limits=limits, refusals=app.refusals, connections=ConnectionTable(limits), error=app.error
        )
        self._config = Config(app, http=GuardedProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
        self._config.load()
        self._num = 0

    async def drawn(self, draw: Random) -> bytes:
        """Draw requests, one behind the other, and where their bytes are cut."""
        made = b"".join(request_of(draw) for _ in range(draw.choice((1, 1, 1, 2, 3))))
        return bytes((draw.randrange(256),)) + (mutated(draw, made) if draw.random() < 0.3 else made)

    async def put(self, data: bytes) -> None:
        """Send bytes, close, and read all replies."""
        if not data:
            return
        self._num += 1
        pieces = list(in_pieces(data[1:], data[0]))
        if self._num % 100 == 0:
            written = await self._over_socket(pieces)
        else:
            written = await self._in_process(pieces)
        self._calls.clear()
        replies = Replies()
        if b"HEAD " in data:  # no parser knows that such a reply has no body
            return
        try:
            replies.feed(written)
        except httptools.HttpParserError as error:
            raise FoundError(f"replies that are no HTTP: {error}") from None
        for status in replies.statuses:
            require(status < 500 or status in STATUSES, f"status {status}")

    async def _in_process(self, pieces: list[bytes]) -> bytes:
        state = ServerState()
        protocol = GuardedProtocol(self._guard, config=self._config, server_state=state, app_state={})
        transport = Wire(protocol)
        protocol.connection_made(transport)
        for piece in pieces:
            if transport.is_closing():
                break
            protocol.data_received(piece)
            await asyncio.sleep(0)
        cycle = protocol.cycle
        if cycle is not None and not cycle.more_body:
            async with asyncio.timeout(END_S):
                while not (cycle.response_complete or cycle.disconnected or transport.is_closing()):  # noqa: ASYNC110
                    await asyncio.sleep(0.0002)
        transport.close()
        if state.tasks:
            done, left = await asyncio.wait(state.tasks, timeout=END_S)
            require(not left, "a request goes on without its client")
            for task in done:
                task.result()
        else:
            await asyncio.sleep(0)
        require(protocol._timer is None and protocol._unread_timer is None, "a timer is left")  # noqa: SLF001
        return bytes(transport.written)

    async def _over_socket(self, pieces: list[bytes], within_s: float = QUIET_S) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        received = b""
        with suppress(ConnectionError, TimeoutError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            async with asyncio.timeout(within_s):
                while data := await reader.read(2**16):
                    received += data
        writer.transport.abort()
        return received

    async def audit(self) -> None:
        """Check that no connection and no request is left, and that a valid request is served."""
        for _ in range(200):
            if not len(self._app):
                break
            await asyncio.sleep(0.01)
        require(len(self._app) == 0, "requests are under way")
        require(len(self._guard.connections) == 0, "connections are left")
        body = b'{"model": "tiny", "prompt": "Say hello"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        for written in (await self._in_process([head + body]), await self._over_socket([head + body], END_S)):
            require(written.startswith(b"HTTP/1.1 200"), "a valid request is not served")


@asynccontextmanager
async def open_http_head(_: Path) -> AsyncIterator[HttpHeadTarget]:
    """Run a gateway before a stub engine."""
    async with AsyncExitStack() as stack:
        (engine,) = await stack.enter_async_context(engines(answers))
        given = GatewaySettings(engine_urls=(engine.url,), attempts=1, max_body_bytes=2**16)
        running = await stack.enter_async_context(serving(given, ServerSettings(drain_s=0.0)))
        yield HttpHeadTarget(running.gateway, running.port, engine.calls)
