"""The gateway's HTTP surface: OpenAI's endpoints, health, readiness, metrics; as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, cast
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.asking import REQUEST_ID, Ask, read_body, read_headers
from services.gateway.exchange import Exchange, Send, Shared
from services.gateway.keys import ApiKeys
from services.gateway.refusals import RefusedError
from services.http_client import Headers
from services.log_lines import say

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
BODY_S = 60
AUTHORIZATION = b"authorization"

# What is said to us, and not to the engine.
HOP_BY_HOP = frozenset(
    (b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"te", b"trailer", b"upgrade",
     b"expect", b"proxy-connection", b"proxy-authorization", b"accept-encoding", REQUEST_ID)
)  # fmt: skip
KEPT_CONNECTIONS = (b"keep-alive", b"close")


class ClientLeftError(Exception):
    """Nobody is there any more to answer."""


class Gateway:
    """Serves all requests; `cut_off` ends those that are still under way when there is no more time."""

    def __init__(self, shared: Shared, keys: ApiKeys) -> None:
        """Serve with what the requests share."""
        self.draining = False
        self._shared = shared
        self._keys = keys
        self._known_models = frozenset(shared.settings.models)
        self._most = shared.settings.max_concurrency
        self._most_bytes = shared.settings.max_body_bytes
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._cut_off = False
        shared.metrics.watch(lambda: len(self._under_way), lambda: len(shared.releases))
        self._endpoints: dict[str, dict[str, Endpoint]] = {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/models": {"GET": self._list_models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }

    def __len__(self) -> int:
        """How many requests are under way."""
        return len(self._under_way)

    def cut_off(self) -> None:
        """End all that is under way, each with an error that its client can read."""
        self._cut_off = True
        for task in self._under_way.values():
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        endpoint = None
        try:
            methods = self._endpoints.get(path)
            if methods is None:
                raise RefusedError(404, f"there is nothing at {path[:100]}")
            endpoint = methods.get(scope["method"])
            if endpoint is None:
                raise RefusedError(405, f"{path} takes {', '.join(methods)}, not {scope['method'][:20]}")
            await endpoint(scope, receive, send)
        except RefusedError as refused:
            await _refuse(send, refused)
            self._shared.metrics.answered(path if endpoint else "other", refused.status)

    # Completions.

    async def _completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send, chat=False)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send, chat=True)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, chat: bool) -> None:
        """Serve a completion, as long as its client stays."""
        arrived_s, arrived_unix_s = time.monotonic(), time.time()
        headers: Headers = scope["headers"]
        shown_id = uuid4().hex
        try:
            client = self._admitted(headers)
            wishes = read_headers(headers)
            shown_id = wishes.request_id or shown_id
            body = await _body(headers, receive, self._most_bytes)
            ask = self._asked(body, chat=chat)
        except ClientLeftError:
            self._shared.metrics.clients_left.inc()
            return
        except (RefusedError, ValueError) as error:
            refused = RefusedError.of(error)
            await _refuse(send, refused, shown_id)
            self._shared.metrics.answered(scope["path"], refused.status)
            return
        request_id = shown_id if shown_id not in self._under_way else f"{shown_id}-{uuid4().hex[:8]}"
        exchange = Exchange(
            shared=self._shared,
            ask=ask,
            wishes=wishes,
            shown_id=shown_id,
            request_id=request_id,
            client_id=client or wishes.fairness_id,
            prompt_tokens=self._shared.sizes.tokens(ask),
            target=_target(scope),
            headers=_passed_on(headers, request_id, with_authorization=not self._keys),
            body=body,
            send=send,
            arrived_s=arrived_s,
            arrived_unix_s=arrived_unix_s,
        )
        await self._run(exchange, receive, scope["path"])

    def _admitted(self, headers: Headers) -> str:
        """Let a request in; give the name of its key's holder."""
        client = ""
        if self._keys:
            holder = self._keys.holder(dict(headers).get(AUTHORIZATION))
            if holder is None:
                raise RefusedError(401, "this API key is not known here")
            client = holder
        if self.draining:
            raise RefusedError(503, "the gateway is going away")
        if len(self._under_way) >= self._most:
            raise RefusedError(429, f"{self._most} requests are under way, as many as may be")
        return client

    def _asked(self, body: bytes, *, chat: bool) -> Ask:
        ask = read_body(body, chat=chat)
        if self._known_models and ask.model not in self._known_models and ask.model:
            raise no_such_model(ask.model)
        return ask

    async def _run(self, exchange: Exchange, receive: Receive, path: str) -> None:
        """See an exchange through; end it at once when its client leaves."""
        loop = self._shared.loop
        task = cast("asyncio.Task[None]", asyncio.current_task())
        here = left = False

        def gone(_: asyncio.Task[Any]) -> None:
            nonlocal left
            if here:
                left = True
                task.cancel()

        watch: asyncio.Task[Any] = loop.create_task(cast("Coroutine[Any, Any, Any]", receive()))
        watch.add_done_callback(gone)
        here = True
        self._under_way[exchange.request_id] = task
        refused: RefusedError | None = None
        try:
            await exchange.run()
        except asyncio.CancelledError:
            if left:
                self._shared.metrics.clients_left.inc()
                say(log, logging.DEBUG, "client left", request_id=exchange.request_id)
            elif not self._cut_off:
                raise
            task.uncancel()
            refused = RefusedError(503, "the gateway is going away")
        except RefusedError as error:
            refused = error
        except Exception as error:
            log.exception("failed", extra={"fields": {"request_id": exchange.request_id}})
            refused = RefusedError.of(error)
        finally:
            here = False
            watch.cancel()
            del self._under_way[exchange.request_id]
        if left:
            self._shared.metrics.answered(path, 499)
            return
        self._shared.metrics.answered(path, exchange.status if exchange.started or refused is None else refused.status)
        if refused is not None:
            if exchange.streaming:
                await exchange.cut(refused)
            elif not exchange.started:
                await _refuse(exchange.send, refused, exchange.shown_id)

    # The rest.

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self._admitted(scope["headers"])
        models = await self._shared.models.listed()
        await _reply(send, 200, JSON, json.dumps({"object": "list", "data": models}).encode())

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await _reply(send, 200, JSON, b'{"status": "ok"}')

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        if self.draining:
            raise RefusedError(503, "the gateway is going away")
        if not self._shared.last_resort.places and not self._shared.schedulers.reachable():
            raise RefusedError(503, "no scheduler can be reached")
        await _reply(send, 200, JSON, b'{"status": "ready"}')

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await _reply(send, 200, CONTENT_TYPE_LATEST.encode(), generate_latest(self._shared.metrics.registry))


def no_such_model(model: str) -> RefusedError:
    """Refuse a name that nobody serves."""
    return RefusedError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")


async def _body(headers: Headers, receive: Receive, most_bytes: int) -> bytes:
    """Receive a body, up to the limit."""
    too_long = RefusedError(413, f"the body may have at most {most_bytes} bytes")
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    if int(length) > most_bytes:  # digits only: the server's parser has seen to that
        raise too_long
    try:
        async with asyncio.timeout(BODY_S):
            return await _received(receive, most_bytes, too_long)
    except TimeoutError:
        raise RefusedError(408, f"the body did not come within {BODY_S} s") from None


async def _received(receive: Receive, most_bytes: int, too_long: RefusedError) -> bytes:
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


def _target(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["path"].encode()  # one of our endpoints, however it was spelt
    return path + b"?" + query if query else path


def _passed_on(headers: Headers, request_id: str, *, with_authorization: bool) -> Headers:
    """Leave out what is between the client and us."""
    passed = [pair for pair in headers if pair[0] not in HOP_BY_HOP]
    for name, value in headers:
        if name == b"connection" and value.lower() not in KEPT_CONNECTIONS:
            named = {word.strip().lower() for word in value.split(b",")}
            passed = [pair for pair in passed if pair[0] not in named]
    if not with_authorization:
        passed = [pair for pair in passed if pair[0] != AUTHORIZATION]
    passed.append((REQUEST_ID, request_id.encode()))
    return passed


async def _reply(send: Send, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse(send: Send, refused: RefusedError, shown_id: str | None = None) -> None:
    headers = refused.headers()
    if shown_id is not None:
        headers.append((REQUEST_ID, shown_id.encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": refused.body(), "more_body": False})
