"""The gateway's HTTP surface: OpenAI's endpoints, health, readiness, metrics; as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, cast
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.context import GatewayContext
from services.gateway.incoming import (
    AUTHORIZATION,
    Incoming,
    body_to_pass,
    headers_to_pass,
    request_message,
    target_of,
)
from services.gateway.keys import ApiKeys
from services.gateway.placing import Placing
from services.gateway.proxy import ProxiedExchange
from services.gateway.request_headers import RequestHeaders, read_headers, request_id_of
from services.http.client import Headers
from services.http.errors import ApiError
from services.http.openai_body import OpenAIRequest, read_body
from services.http.reply import Client, Send
from services.http.request_body import ClientLeftError, Receive, received, while_client_stays
from services.logs import log_event

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Endpoint = Callable[[Scope, Receive, Client], Awaitable[None]]

JSON: Headers = [(b"content-type", b"application/json")]
METRICS: Headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
CLIENT_LEFT = 499  # nginx's status for it, in metrics only
GOING_AWAY = "the gateway is going away"


class Gateway:
    """Serves all requests; `cut_off` ends those that are still under way when there is no more time."""

    def __init__(self, shared: GatewayContext, keys: ApiKeys) -> None:
        """Serve with what the requests share."""
        self.draining = False
        self._shared = shared
        self._keys = keys
        self._known_models = frozenset(shared.settings.models)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._names: set[str] = set()  # of requests under way
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
        for task in self._under_way:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; what goes wrong is an answer too."""
        if scope["type"] != "http":
            return
        client = Client(send=send, request_id=uuid4().hex)
        path, left = "other", False
        try:
            client.request_id = _request_id(scope["headers"]) or client.request_id
            endpoint = self._endpoint(scope)
            path = scope["path"]
            await endpoint(scope, receive, client)
        except ApiError as refused:
            await client.refuse(refused)
        except asyncio.CancelledError:
            if not self._cut_off:
                raise
            cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
            await client.refuse(ApiError(503, GOING_AWAY))
        except ClientLeftError:
            left = True
            self._shared.metrics.clients_left.inc()
            log_event(log, logging.DEBUG, "client left", request_id=client.request_id)
        except Exception:
            log.exception("failed", extra={"fields": {"request_id": client.request_id}})
            await client.refuse(ApiError(500, "internal error; the gateway's log has more"))
        self._shared.metrics.answered(path, CLIENT_LEFT if left else client.status)

    def _endpoint(self, scope: Scope) -> Endpoint:
        path, method = scope["path"], scope["method"]
        methods = self._endpoints.get(path)
        if methods is None:
            raise ApiError(404, f"there is nothing at {path[:100]}")
        if method not in methods:
            raise ApiError(405, f"{path} takes {', '.join(methods)}, not {method[:20]}")
        return methods[method]

    # Completions.

    async def _completions(self, scope: Scope, receive: Receive, client: Client) -> None:
        await self._complete(scope, receive, client, chat=False)

    async def _chat(self, scope: Scope, receive: Receive, client: Client) -> None:
        await self._complete(scope, receive, client, chat=True)

    async def _complete(self, scope: Scope, receive: Receive, client: Client, *, chat: bool) -> None:
        """Let a request in, read it, and see it through."""
        shared = self._shared
        headers: Headers = scope["headers"]
        holder = self._let_in(headers)
        with self._counted(client.request_id) as name:
            body = await received(headers, receive, shared.settings.max_body_bytes)
            ask, wishes = self._read(body, headers, chat=chat)
            num_tokens, names = await shared.prompts.read_aside(ask)
            request = request_message(ask, wishes, request_id=name, client_id=holder, prompt_tokens=num_tokens)
            if names:
                request.prefix_hashes.extend(names)
                request.prefix_block_tokens = shared.settings.block_tokens
            request.arrival_unix_s = client.arrived_unix_s
            incoming = Incoming(
                arrived_s=client.arrived_s,
                ask=ask,
                request=request,
                target=target_of(scope),
                headers=headers_to_pass(headers, name, with_authorization=not self._keys),
                body=body_to_pass(body, ask, request.priority),
                explain=wishes.explain,
            )
            placing = Placing(shared=shared, incoming=incoming)
            exchange = ProxiedExchange(shared=shared, incoming=incoming, client=client, placing=placing)
            await while_client_stays(exchange.run(), receive)

    @contextmanager
    def _counted(self, shown_id: str) -> Iterator[str]:
        """Hold the place of a request that is under way, and give it a name that no other has meanwhile."""
        if len(self._under_way) >= self._shared.settings.max_concurrency:
            raise ApiError(429, f"{len(self._under_way)} requests are under way, as many as may be")
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        name = shown_id if shown_id not in self._names else f"{shown_id}-{uuid4().hex[:8]}"
        self._under_way.add(task)
        self._names.add(name)
        try:
            yield name
        finally:
            self._names.discard(name)
            self._under_way.discard(task)

    def _let_in(self, headers: Headers) -> str:
        """Let somebody in; give the name of the key's holder."""
        holder = self._keys.holder(dict(headers).get(AUTHORIZATION)) if self._keys else ""
        if holder is None:
            raise ApiError(401, "this API key is not known here")
        if self.draining:
            raise ApiError(503, GOING_AWAY)
        return holder

    def _read(self, body: bytes, headers: Headers, *, chat: bool) -> tuple[OpenAIRequest, RequestHeaders]:
        try:
            ask, wishes = read_body(body, chat=chat), read_headers(headers)
        except ValueError as error:
            raise ApiError.of(error) from None
        if self._known_models and ask.model and ask.model not in self._known_models:
            raise no_such_model(ask.model)
        return ask, wishes

    # The rest.

    async def _list_models(self, scope: Scope, receive: Receive, client: Client) -> None:  # noqa: ARG002
        self._let_in(scope["headers"])
        models = await self._shared.models.listed()
        await client.answer(200, JSON, json.dumps({"object": "list", "data": models}).encode())

    async def _health(self, scope: Scope, receive: Receive, client: Client) -> None:  # noqa: ARG002
        await client.answer(200, JSON, b'{"status": "ok"}')

    async def _ready(self, scope: Scope, receive: Receive, client: Client) -> None:  # noqa: ARG002
        if self.draining:
            raise ApiError(503, GOING_AWAY)
        if not self._shared.last_resort and not self._shared.schedulers.reachable():
            raise ApiError(503, "no scheduler can be reached")
        await client.answer(200, JSON, b'{"status": "ready"}')

    async def _metrics(self, scope: Scope, receive: Receive, client: Client) -> None:  # noqa: ARG002
        await client.answer(200, METRICS, generate_latest(self._shared.metrics.registry))


def _request_id(headers: Headers) -> str:
    try:
        return request_id_of(headers)
    except ValueError as error:
        raise ApiError.of(error) from None


def no_such_model(model: str) -> ApiError:
    """Refuse a name that nobody serves."""
    return ApiError(404, f"The model `{model}` does not exist.", code="model_not_found", param="model")
