"""The gateway's HTTP surface: OpenAI's endpoints, health, readiness, metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

from services.gateway.attainment import attainment_of
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming, headers_to_pass, target_of
from services.gateway.placing import Placing
from services.gateway.proxy import RequestForwarder
from services.gateway.request_spans import recorded
from services.gateway.usage import UsageControl
from services.http.application import CLIENT_LEFT, JSON, Application, Call, while_client_stays
from services.http.client import Headers
from services.http.errors import ApiError
from services.http.openai_body import OpenAIRequest, read_body, with_fields
from services.http.operator_port import reply_metrics
from services.http.request_facts import RequestHeaders, body_to_pass, read_headers, request_id_of, request_message
from services.http.stream_continuation import IDS_FIELD
from services.live_page.pages import LivePage
from services.security.access import AccessControl
from services.security.keys import KeyHolder
from services.security.roles import FOR_CLIENTS
from services.tracing.request_spans import RequestSpans

log = logging.getLogger(__name__)

RETURN_IDS = b'"%s":true' % IDS_FIELD.encode()


class Gateway(Application):
    """Serves OpenAI's endpoints by forwarding each completion to an engine."""

    name = "gateway"
    unlisted = FOR_CLIENTS

    def __init__(self, context: GatewayContext, access: AccessControl) -> None:
        """Serve with what all requests share; `access` checks clients and operators."""
        super().__init__(
            max_concurrency=context.settings.max_concurrency,
            access=access,
            limits=context.settings.http,
            registry=context.metrics.registry,
        )
        self._context = context
        self._access = access
        self._usage = UsageControl(access, context.loop.time)
        self._known_models = frozenset(context.settings.models)
        self._request_ids: set[str] = set()  # of requests under way
        context.metrics.watch(self.__len__, lambda: len(context.releases))
        self.routes = {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/models": {"GET": self._list_models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
            **LivePage(
                context.schedulers.frames(context.metrics.registry),
                is_draining=lambda: self.draining,
            ).routes,
        }

    def request_id_of(self, call: Call) -> str:
        """Read the client's id of its request; a bad one is refused."""
        try:
            return request_id_of(call.headers) or call.request_id
        except ValueError as error:
            raise ApiError.of(error) from None

    def on_end(self, call: Call, path: str, status: int) -> None:  # noqa: ARG002
        """Count a reply."""
        if status == CLIENT_LEFT:
            self._context.metrics.clients_left.inc()
        self._context.metrics.replied(path, status)

    # Completions.

    async def _completions(self, call: Call) -> None:
        await self._complete(call, chat=False)

    async def _chat(self, call: Call) -> None:
        await self._complete(call, chat=True)

    async def _complete(self, call: Call, *, chat: bool) -> None:
        """Authenticate and read a request, place it, and forward it."""
        context = self._context
        self.require_open()
        holder = holder_of(call)
        with ExitStack() as stack:
            stack.enter_context(self.admitted())
            request_id = stack.enter_context(self._unique(call.request_id))
            body = await self.body_of(call, context.settings.max_body_bytes)
            openai, headers = self._read(body, call.headers, chat=chat)
            self._usage.require_model(holder, openai.model)
            num_tokens, block_names = await context.prompts.read_aside(openai)
            try:
                request = request_message(
                    openai,
                    headers,
                    context.objectives,
                    request_id=request_id,
                    prompt_tokens=num_tokens,
                    client_id=holder.tenant,
                    objective=holder.objective,
                )
            except ValueError as error:
                raise ApiError.of(error) from None
            if block_names:
                request.prefix_hashes.extend(block_names)
                request.prefix_block_tokens = context.settings.block_tokens
            request.arrival_unix_s = call.arrived_unix_s
            hides_token_ids = context.settings.asks_for_token_ids(openai)
            client_body = with_fields(body, RETURN_IDS) if hides_token_ids else body
            usage = stack.enter_context(self._usage.metered(call, holder, openai, request.prompt_tokens))
            spans = RequestSpans(context.tracer, call.headers, openai, request, call.arrived_unix_s, chat=chat)
            hides_keys = self._access.checks_keys or context.engines.sends_key
            passed = headers_to_pass(call.headers, request_id, with_keys=not hides_keys)
            incoming = Incoming(
                arrived_s=call.arrived_s,
                openai=openai,
                request=request,
                target=target_of(call.scope),
                spans=spans,
                headers=spans.headers_from(passed),
                own_body=body,
                client_body=client_body,
                body=body_to_pass(client_body, openai, request),
                is_chat=chat,
                usage=usage,
                hides_token_ids=hides_token_ids,
                explain=headers.explain,
            )
            placing = Placing(shared=context, incoming=incoming, undivided=openai.undivided)
            forwarder = RequestForwarder(
                context=context,
                incoming=incoming,
                call=call,
                placing=placing,
                attainment=attainment_of(incoming, context.metrics),
            )
            with recorded(spans, call):
                await while_client_stays(forwarder.run(), call.receive)

    @contextmanager
    def _unique(self, request_id: str) -> Iterator[str]:
        """Give a request an id that no other has while it is under way."""
        if request_id in self._request_ids:
            request_id = f"{request_id}-{uuid4().hex[:8]}"
        self._request_ids.add(request_id)
        try:
            yield request_id
        finally:
            self._request_ids.discard(request_id)

    def _read(self, body: bytes, headers: Headers, *, chat: bool) -> tuple[OpenAIRequest, RequestHeaders]:
        try:
            openai = read_body(body, chat=chat, max_depth=self.limits.max_json_depth)
            request_headers = read_headers(headers)
        except ValueError as error:
            raise ApiError.of(error) from None
        if self._known_models and openai.model and openai.model not in self._known_models:
            raise ApiError(404, f"The model `{openai.model}` does not exist.", code="model_not_found", param="model")
        if openai.has_kv_transfer_params and not self._context.settings.allow_kv_transfer_params:
            raise ApiError(400, "kv_transfer_params: clients may not set it here", param="kv_transfer_params")
        return openai, request_headers

    # Everything else.

    async def _list_models(self, call: Call) -> None:
        self.require_open()
        holder = holder_of(call)
        models = [model for model in await self._context.models.listed() if holder.may_use(model["id"])]
        await call.reply(200, JSON, json.dumps({"object": "list", "data": models}).encode())

    async def _health(self, call: Call) -> None:
        await call.reply(200, JSON, b'{"status": "ok"}')

    async def _ready(self, call: Call) -> None:
        self.require_open()
        if not self._context.last_resort and not self._context.schedulers.reachable():
            raise ApiError(503, "no scheduler can be reached")
        problem = self._access.problem()
        problems = {"problems": [problem]} if problem else {}
        await call.reply(200, JSON, json.dumps({"status": "ready", **problems}).encode())

    async def _metrics(self, call: Call) -> None:
        await reply_metrics(call, self._context.metrics.registry)


def holder_of(call: Call) -> KeyHolder:
    """Return the holder of the key of a call that has been admitted."""
    assert call.caller is not None, "the route is for clients"
    return call.caller.holder
