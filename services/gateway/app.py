"""The gateway's HTTP surface: OpenAI's endpoints, health, readiness, metrics."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from uuid import uuid4

from services.gateway.announced_paths import may_be_passed
from services.gateway.attainment import attainment_of
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming, headers_to_pass, target_of
from services.gateway.kept_responses import KeptResponse
from services.gateway.placing import Placing
from services.gateway.proxy import RequestForwarder
from services.gateway.request_spans import recorded
from services.gateway.responses_by_id import MAX_BODY_BYTES, pass_to_instance
from services.gateway.usage import UsageControl
from services.http.application import CLIENT_LEFT, JSON, Application, Call, Endpoint, while_client_stays
from services.http.continuable import IDS_FIELD
from services.http.endpoints import ENDPOINTS, EngineEndpoint, announced_endpoint, errors_of
from services.http.error_shape import ErrorShape
from services.http.errors import ApiError
from services.http.json_fields import with_fields
from services.http.openai_body import OpenAIRequest
from services.http.operator_port import reply_metrics
from services.http.paths import REALTIME
from services.http.request_facts import (
    RequestHeaders,
    body_to_pass,
    priority_of,
    read_headers,
    request_id_of,
    request_message,
)
from services.live_page.pages import LivePage
from services.security.access import AccessControl
from services.security.keys import KeyHolder
from services.security.roles import FOR_CLIENTS
from services.tracing.request_spans import RequestSpans

log = logging.getLogger(__name__)

RESPONSE_PATH = re.compile(r"/v1/responses/(?P<id>resp_[\w.-]{1,300})(?P<cancel>/cancel)?")
RESPONSE_ROUTES = {"GET": "/v1/responses/{id}", "POST": "/v1/responses/{id}/cancel"}
ANNOUNCED = "announced"  # the route of paths that instances announce, in metrics
SAFE_ID = re.compile(r"[\w.-]{1,200}")
RETURN_IDS = {IDS_FIELD: b"true"}


def response_name(request_id: str) -> dict[str, bytes]:
    """Return the field that gives a response an id, by which a sidecar knows the request of its reservation."""
    return {"request_id": b'"resp_%s_%s"' % (request_id.encode(), uuid4().hex[:8].encode())}


class Gateway(Application):
    """Serves the endpoints of engines by forwarding each request to one of them."""

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
        self._request_ids: set[str] = set()  # of requests under way
        context.metrics.watch(self.__len__, lambda: len(context.releases))
        self.routes = {
            **{path: {"POST": partial(self._serve, endpoint)} for path, endpoint in ENDPOINTS.items()},
            REALTIME: {"GET": self._refuse_realtime},
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

    def endpoint_of(self, call: Call) -> Endpoint:
        """Find what serves a path: a route, a response by its id, or what instances announce."""
        path, method = call.scope["path"], call.scope["method"]
        if path in self.routes:
            return super().endpoint_of(call)
        found = RESPONSE_PATH.fullmatch(path)
        if found is not None:
            allowed = "POST" if found["cancel"] else "GET"
            call.route = RESPONSE_ROUTES[allowed]
            if method != allowed:
                raise self.not_allowed(path, method, [allowed])
            return partial(self._serve_kept, found["id"])
        if method == "POST" and may_be_passed(path):
            call.route = ANNOUNCED
            return self._serve_announced
        return super().endpoint_of(call)

    def errors_of(self, path: str) -> ErrorShape:
        """Return the shape of the errors of a path."""
        return errors_of(path)

    # What engines serve.

    async def _serve_kept(self, response_id: str, call: Call) -> None:
        """Serve a request for a response that an instance keeps."""
        kept = self._context.kept.find(response_id, holder_of(call).tenant)
        if kept is None:
            raise ApiError(404, f"response {response_id!r} is not known here")
        headers = headers_to_pass(call.headers, call.request_id, with_keys=not self._hides_keys)
        with self.admitted():
            await self.body_of(call, MAX_BODY_BYTES)
            await while_client_stays(pass_to_instance(self._context, kept, call, headers), call.receive)

    async def _serve_announced(self, call: Call) -> None:
        """Serve a path that some instances announce."""
        path = call.scope["path"]
        others = await self._context.announced.others(path)
        if others is None:
            raise self.not_found(path)
        await self._serve(announced_endpoint(path), call, others)

    async def _serve(self, endpoint: EngineEndpoint, call: Call, excluded: Sequence[str] = ()) -> None:
        """Read a request, place it, and forward it."""
        context = self._context
        holder = holder_of(call)
        with ExitStack() as stack:
            stack.enter_context(self.admitted())
            request_id = stack.enter_context(self._unique(call.request_id))
            body = await self.body_of(call, context.settings.max_body_bytes)
            openai, headers = self._read(endpoint, body, call)
            if openai.model:
                await context.models.require(openai.model)
            self._usage.require_model(holder, openai.model)
            kept = self._kept_for(openai, holder)
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
            client_body = with_fields(body, RETURN_IDS, openai.fields) if hides_token_ids else body
            if openai.is_kept and not openai.names_itself and SAFE_ID.fullmatch(request_id):
                client_body = with_fields(client_body, response_name(request_id), openai.fields)
            usage = stack.enter_context(self._usage.metered(call, holder, openai, request.prompt_tokens))
            spans = RequestSpans(context.tracer, call.headers, openai, request, call.arrived_unix_s)
            # an objective's priority is for schedulers, unless the engines are said to order by priority
            passes_priority = context.settings.pass_objective_priority or priority_of(openai, headers) is not None
            passed = headers_to_pass(call.headers, request_id, with_keys=not self._hides_keys)
            incoming = Incoming(
                arrived_s=call.arrived_s,
                endpoint=endpoint,
                openai=openai,
                request=request,
                target=target_of(call.scope),
                spans=spans,
                headers=spans.headers_from(passed),
                own_body=body,
                client_body=client_body,
                body=body_to_pass(client_body, openai, request, passes_priority=passes_priority),
                passes_priority=passes_priority,
                owner=holder.tenant,
                usage=usage,
                hides_token_ids=hides_token_ids,
                explain=headers.explain,
            )
            placing = Placing(shared=context, incoming=incoming, kept=kept)
            for instance_id in excluded:
                placing.exclude(instance_id)
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

    @property
    def _hides_keys(self) -> bool:
        """Whether the keys of clients stay here."""
        return self._access.checks_keys or self._context.engines.sends_key

    def _kept_for(self, openai: OpenAIRequest, holder: KeyHolder) -> KeptResponse | None:
        """Find where the response is kept that a request continues."""
        if not openai.response_id:
            return None
        kept = self._context.kept.find(openai.response_id, holder.tenant)
        if kept is None:
            message = f"previous_response_id: {openai.response_id!r} is not known here"
            raise ApiError(404, message, code="previous_response_not_found")
        return kept

    def _read(self, endpoint: EngineEndpoint, body: bytes, call: Call) -> tuple[OpenAIRequest, RequestHeaders]:
        try:
            openai = endpoint.read(body, call.header(b"content-type") or b"", self.limits.max_json_depth)
            request_headers = read_headers(call.headers)
        except ValueError as error:
            raise ApiError.of(error) from None
        if openai.has_kv_transfer_params and not self._context.settings.allow_kv_transfer_params:
            raise ApiError(400, "kv_transfer_params: clients may not set it here", param="kv_transfer_params")
        return openai, request_headers

    # Everything else.

    async def _refuse_realtime(self, _: Call) -> None:
        raise ApiError(400, "realtime sessions over WebSocket are not served; use /v1/responses or /v1/audio")

    async def _list_models(self, call: Call) -> None:
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
