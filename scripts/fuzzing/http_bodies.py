"""A target behind HTTP: the bodies of all endpoints, without a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE

from predictor.config import EngineConfig
from predictor.mirror.events import MirrorEvent
from predictor.profile import load_profile
from scripts.fuzzing.bodies import body_of, headers_of
from scripts.fuzzing.http_stubs import CLIENT, END_S, STATUSES, answers, gateway_before, lenient_answers
from scripts.fuzzing.targets import FoundError, require
from services.emulator.app import CONNECTION
from services.emulator.server import application, warm
from services.emulator.settings import EmulatorSettings
from services.http.application import Application
from services.http.headers import Headers
from services.http.operator_port import OperatorPort
from services.http.origin import origin_of
from services.predictor_server.proxy import Proxy
from services.predictor_server.settings import MirrorSettings
from tests.services.gateway.stubs import Call, engines

ENDLESS = ("/ui/tail",)  # until the client leaves


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


class NoMirror:
    """Takes the events of a proxy, as a mirror that reads tokens does, and forgets them."""

    reads_tokens = True

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
