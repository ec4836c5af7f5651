"""Targets behind HTTP: the bodies of all endpoints, and whatever comes over a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httptools
from prometheus_client import CollectorRegistry
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE
from uvicorn.server import ServerState

from predictor.config import EngineConfig
from predictor.mirror.events import MirrorEvent
from predictor.profile import load_profile
from scripts.fuzzing.bodies import body_of, headers_of
from scripts.fuzzing.inputs import mutated
from scripts.fuzzing.targets import FoundError, require
from services.emulator.app import CONNECTION
from services.emulator.server import application, warm
from services.emulator.settings import EmulatorSettings
from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.http.application import Application
from services.http.client import Headers, origin_of
from services.http.guarded_protocol import ConnectionGuard, GuardedProtocol
from services.http.limits import ConnectionTable, HttpLimits
from services.http.operator_port import OperatorPort
from services.predictor_server.proxy import Proxy
from services.predictor_server.settings import MirrorSettings
from services.rpc.settings import ServerSettings
from tests.services.gateway.stubs import Call, completes, engines, streams

QUIET_S = 0.05  # after which a client leaves, whatever it has
END_S = 20.0  # for a request that has all that it needs
STATUSES = (503,)  # of 5xx, that may be the client's fault: it asks for what no instance has
CLIENT = ("192.0.2.1", 4711)  # not this machine: faults of emulated engines can be set from there only
ENDLESS = ("/ui/tail",)  # until the client leaves


async def answers(call: Call) -> None:
    """Reply as an engine does; a body that is no JSON is the gateway's error."""
    data = json.loads(call.body) if call.body else {}
    await (streams(call) if isinstance(data, dict) and data.get("stream") is True else completes(call))


async def lenient_answers(call: Call) -> None:
    """Do the same, and refuse what is no JSON: a proxy passes any body on."""
    try:
        json.loads(call.body or b"{}")
    except (ValueError, RecursionError):
        call.whole({"error": {"message": "no JSON"}}, 400)
    else:
        await answers(call)


@dataclass(kw_only=True)
class SentReply:
    """What an application sent."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False


async def ask(  # noqa: PLR0917 - a request
    app: Application, method: str, path: str, headers: Headers, pieces: list[bytes], leaves: float
) -> SentReply:
    """Make a request without a connection; the client `leaves` after some seconds, or when it has the reply."""
    reply, gone = SentReply(), asyncio.Event()
    waiting = iter(pieces)
    left = len(pieces)

    async def receive() -> dict[str, Any]:
        nonlocal left
        if left:
            left -= 1
            return {"type": "http.request", "body": next(waiting), "more_body": left > 0}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            for name, value in message["headers"]:
                require(not HEADER_RE.search(name) and not HEADER_VALUE_RE.search(value), "a header that is invalid")
        else:
            reply.body += message["body"]
            reply.is_whole = not message.get("more_body", False)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "client": CLIENT, "http_version": "1.1", "scheme": "http",
        "extensions": {CONNECTION: {"protocol": SimpleNamespace(flow=SimpleNamespace(write_paused=True))}},
    }  # fmt: skip
    task = asyncio.ensure_future(app(scope, receive, send))
    if leaves:
        await asyncio.sleep(leaves)
        gone.set()
    done, _ = await asyncio.wait([task], timeout=END_S)
    if not done:
        gone.set()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        raise FoundError(f"{method} {path} does not end")
    task.result()
    require(leaves or reply.is_whole, "a reply without an end")
    require(reply.status < 500 or reply.status in STATUSES, f"status {reply.status} for {method} {path}")
    if 400 <= reply.status < 500 and method != "HEAD" and app.name != "sidecar":
        json.loads(reply.body)
    return reply


class HttpBodyTarget:
    """Sends requests to all routes of all our HTTP applications."""

    name = "http_body"

    def __init__(self, apps: Mapping[str, Application], calls: list[list[Call]]) -> None:
        """Ask these applications; `calls` are those that the engines behind them keep."""
        self._apps = apps
        self._calls = calls

    async def drawn(self, draw: Random) -> bytes:
        """Draw a request: a line about it, and its body."""
        name = draw.choice(("gateway", "gateway", "gateway", *self._apps))
        routes = [
            (method, path)
            for path, methods in self._apps[name].routes.items()
            for method in methods
            if path not in ENDLESS
        ] or [
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
        ]
        method, path = draw.choice(routes)
        posts = [route for route in routes if route[0] == "POST"]
        if posts and draw.random() < 0.9:
            method, path = draw.choice(posts)
        if draw.random() < 0.02:
            method, path = (
                draw.choice(("GET", "PUT", "HEAD", "OPTIONS")),
                draw.choice(("/", "/v1/x", "/v1/completions")),
            )
        body = body_of(draw, chat="chat" in path)
        headers = [[one.decode("latin-1") for one in pair] for pair in headers_of(draw) if pair[0] != b"content-length"]
        leaves = draw.choice((0.001, 0.01)) if draw.random() < 0.01 else 0
        line = {
            "app": name,
            "method": method,
            "path": path,
            "headers": headers,
            "leaves": leaves,
            "cut": draw.randrange(4),
        }
        return json.dumps(line).encode() + b"\n" + body

    async def put(self, data: bytes) -> None:
        """Make a request."""
        line, _, body = data.partition(b"\n")
        try:
            given = json.loads(line)
            app = self._apps[str(given["app"])]
            headers = [
                (str(name).lower().encode("latin-1"), str(value).encode("latin-1")) for name, value in given["headers"]
            ]
            method, path = str(given["method"])[:20], str(given["path"])
            path.encode("ascii")
            leaves, num = 0.01 if path in ENDLESS else float(given["leaves"]), int(given["cut"])
        except (ValueError, KeyError, TypeError, RecursionError):
            app, headers, method, path, leaves, num = self._apps["gateway"], [], "POST", "/v1/completions", 0.0, 0
            headers = [(b"content-type", b"application/json")]
        headers = [
            pair
            for pair in headers
            if not HEADER_RE.search(pair[0]) and pair[0] and not HEADER_VALUE_RE.search(pair[1])
        ]
        size = len(body) // (num % 8 + 1) + 1
        pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        headers.append((b"content-length", b"%d" % len(body)))
        await ask(app, method, path, headers, pieces, min(max(leaves, 0.0), 0.01) if leaves > 0 else 0.0)
        for calls in self._calls:
            calls.clear()

    async def audit(self) -> None:
        """Check that nothing is under way, and that a valid request is served."""
        for app in self._apps.values():
            require(len(app) == 0, f"{app.name} has requests under way")
        gateway = self._apps["gateway"]
        body = b'{"model": "tiny", "prompt": "Say hello", "max_tokens": 3}'
        for name in ("gateway", "engine", "sidecar"):
            reply = await ask(
                self._apps[name], "POST", "/v1/completions", [(b"content-type", b"application/json")], [body], 0
            )
            require(reply.status == 200, f"a valid request gets status {reply.status}")
        require(not gateway._request_ids, "ids of requests are left")  # type: ignore[attr-defined]  # noqa: SLF001
        reply = await ask(gateway, "GET", "/metrics", [], [b""], 0)
        require(reply.status == 200, "no metrics")


@asynccontextmanager
async def gateway_before(*urls: str, **settings: Any) -> AsyncIterator[Any]:
    """Run a gateway without a scheduler before engines."""
    given = GatewaySettings(engine_urls=urls, **{"attempts": 1, "max_body_bytes": 2**20, **settings})
    async with serving(given, ServerSettings(drain_s=0.0)) as running:
        yield running.gateway


class NoMirror:
    """Takes the events of a proxy, as a mirror that reads tokens does, and forgets them."""

    reads_tokens = True

    def new_name(self, request_id: str) -> str:
        """Return the request's id."""
        return request_id

    def record(self, event: MirrorEvent) -> None:
        """Take an event."""


@asynccontextmanager
async def open_http_body(_: Path) -> AsyncIterator[HttpBodyTarget]:
    """Run a gateway and a mirror's proxy before a stub engine, an emulated engine, and a port for operators."""
    async with AsyncExitStack() as stack:
        engine, other = await stack.enter_async_context(engines(answers, lenient_answers))
        gateway = await stack.enter_async_context(gateway_before(engine.url))
        proxy = Proxy(
            MirrorSettings(engine_url=other.url, counts_prompts=False),
            origin_of(other.url),
            NoMirror(),
            lambda *_: None,
        )
        stack.callback(proxy.close)
        config, profile = (
            EngineConfig(max_num_seqs=16, num_gpu_blocks=257, max_model_len=256),
            load_profile("llama-2-7b-a30"),
        )
        warm(config, profile)
        emulator = application(
            EmulatorSettings(model="tiny", speed=1e6, max_num_queued_reqs=500), config, profile, None
        )
        driving = asyncio.create_task(emulator.driver.run())
        stack.callback(driving.cancel)
        apps = {"gateway": gateway, "engine": emulator, "sidecar": proxy, "operator": OperatorPort(CollectorRegistry())}
        yield HttpBodyTarget(apps, [engine.calls, other.calls])


# Heads: bytes over a connection.


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


LINES = (
    b"GET / HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.1",
    b"GET /health HTTP/1.1", b"GET /metrics HTTP/1.1", b"GET /v1/models HTTP/1.1", b"OPTIONS * HTTP/1.1",
    b"CONNECT a:1 HTTP/1.1", b"GET / HTTP/1.0", b"PRI * HTTP/2.0", b"GET http://a/health HTTP/1.1",
    b"GET http://a HTTP/1.1", b"GET //health HTTP/1.1", b"GET /" + b"a" * 9000 + b" HTTP/1.1",
    b"GET /%2e%2e/%00?a=b#c HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET  / HTTP/1.1", b"get / HTTP/1.1",
    b"GET / HTTP/9.9", b"GET /", b"", b"\x16\x03\x01\x02\x00", b"HTTP/1.1 200 OK", b"TRACE / HTTP/1.1",
    b"HEAD /health HTTP/1.1", b"QUERY / HTTP/1.1",
)  # fmt: skip
UPGRADE = b"connection: upgrade\r\nupgrade: "
ODD_HEADERS = (
    b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity",
    b"transfer-encoding : chunked", b"content-length: -1", b"content-length: +5", b"content-length: 5, 5",
    b"content-length: 5\r\ncontent-length: 6", b"content-length: 99999999999999999999", b"expect: 100-continue",
    b"expect: x", b"connection: close", UPGRADE + b"h2c",
    UPGRADE + b"websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==", b"a: b\r\n c: d", b": x", b"a",
    b"a\x00b: c", b"a: \x00", b"host:", b"x: " + b"y" * 5000, b"x: y\r\n" * 30 + b"z: z", b"x: \xff",
    b"connection: keep-alive, close, a",
)  # fmt: skip


def chunked(draw: Random, body: bytes) -> bytes:
    """Write a body in chunks, some of them wrong."""
    made, at = b"", 0
    while at < len(body):
        size = draw.choice((1, 7, 100, 5000))
        piece = body[at : at + size]
        written = len(piece) if draw.random() < 0.95 else draw.choice((0, 2**31, 2**64, len(piece) + 1))
        extension = draw.choice((b"", b"", b"", b";a=b", b";" + b"x" * 5000, b" "))
        made += b"%x%s\r\n%s\r\n" % (written, extension, piece)
        at += size
    trailers = draw.choice((b"", b"", b"x-block-priority: 1\r\n", b"a: b\r\n" * 30, b"content-length: 3\r\n"))
    return made + b"0\r\n" + trailers + b"\r\n"


def request_of(draw: Random) -> bytes:
    """Draw one request as bytes."""
    body = body_of(draw, chat=draw.random() < 0.3)[:20_000] if draw.random() < 0.6 else b""
    lines = [draw.choice(LINES) if draw.random() < 0.5 else LINES[1], b"host: a", b"content-type: application/json"]
    lines += [b"%s: %s" % pair for pair in headers_of(draw) if b"\n" not in pair[1]]
    if draw.random() < 0.3:
        lines.append(draw.choice(ODD_HEADERS))
    if body:
        if draw.random() < 0.4:
            lines.append(b"transfer-encoding: chunked")
            body = chunked(draw, body)
        else:
            lines.append(b"content-length: %d" % (len(body) if draw.random() < 0.95 else draw.randrange(2**16)))
    end = b"\r\n" if draw.random() < 0.97 else b"\n"
    return end.join((*lines, b"", b"")) + body


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


def in_pieces(data: bytes, how: int) -> Iterator[bytes]:
    """Cut bytes: not at all, into single ones at first, or at regular places."""
    if how < 100:
        yield data
        return
    if how < 130:
        for at in range(min(len(data), 64)):
            yield data[at : at + 1]
        if len(data) > 64:
            yield data[64:]
        return
    size = max(1, (how - 129) * 8)
    for at in range(0, len(data), size):
        yield data[at : at + size]


@asynccontextmanager
async def open_http_head(_: Path) -> AsyncIterator[HttpHeadTarget]:
    """Run a gateway before a stub engine."""
    async with AsyncExitStack() as stack:
        (engine,) = await stack.enter_async_context(engines(answers))
        given = GatewaySettings(engine_urls=(engine.url,), attempts=1, max_body_bytes=2**16)
        running = await stack.enter_async_context(serving(given, ServerSettings(drain_s=0.0)))
        yield HttpHeadTarget(running.gateway, running.port, engine.calls)
