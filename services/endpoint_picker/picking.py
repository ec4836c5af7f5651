"""Chooses the endpoints of a request: reads it as the gateway does, has it placed, and says what the proxy changes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes
from uuid import uuid4

from protos.block.v1 import common_pb2
from scheduler.instances import SHED_REASONS, NoInstanceError, OverloadedError
from services.endpoint_picker.conformance import SELECTION, entries_of
from services.endpoint_picker.endpoints import EndpointTable
from services.endpoint_picker.messages import ENDPOINT, SERVED, SUBSET
from services.endpoint_picker.metrics import PickerMetrics
from services.endpoint_picker.pick_spans import PickSpans
from services.endpoint_picker.response import ResponseReader
from services.endpoint_picker.settings import PickerSettings
from services.explanations import decision_headers
from services.http.application import REQUEST_ID
from services.http.data_parallel import rank_of, with_rank
from services.http.endpoints import ENDPOINTS, PREFILL_ONLY, UNPLACED, EngineEndpoint
from services.http.errors import ApiError
from services.http.headers import Headers
from services.http.openai_body import OpenAIRequest, names_kv_blocks
from services.http.prompt_tokens import PromptTokens
from services.http.proxying import SERVER_ERROR
from services.http.request_facts import (
    READ,
    body_to_pass,
    priority_of,
    read_headers,
    request_id_of,
    request_message,
)
from services.logs import log_event
from services.placement.decision_time import DecisionTime
from services.placement.driver import PlacementDriver
from services.placement.refusals import refusal_of
from services.rpc.errors import INTERNAL, status_of
from services.rpc.objectives import with_objective

if TYPE_CHECKING:
    from services.tracing.spans import RequestTracer

log = logging.getLogger(__name__)

POST = b"POST"
KV_TRANSFER_REFUSED = "kv_transfer_params: clients may not set it here"

MODEL = b"x-gateway-model-name"  # that an earlier filter of the proxy read from the body
REWRITE = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
PREFILLER = "x-prefiller-host-port"  # for llm-d's sidecar of a decode instance
DROPPED = b"x-llm-d-request-dropped-reason"

# Headers that are for the picker, or are its own: what a client sends by these names goes no further.
REMOVED = frozenset(
    (*READ, *REWRITE, ENDPOINT.encode(), SERVED.encode(), SUBSET.encode(), PREFILLER.encode(), DROPPED, SELECTION,
     f"{ENDPOINT}-scores".encode(), b"x-encoder-hosts-ports", b"x-data-parallel-host-port",
     b"x-kv-cache-source-host-port")
)  # fmt: skip

# As other pickers name the reasons.
SATURATED, NO_ENDPOINTS, EXPIRED = "rejected-saturated", "rejected-no-endpoints", "rejected-ttl-expired"
DROPPED_REASONS = {**dict.fromkeys(SHED_REASONS, SATURATED), "timeout": EXPIRED}

ANY_POLICY = "random"  # of requests that are no completions
INVALID, FAILED = "invalid", "failed"  # reasons of refusals that other pickers have no name for
PLACED, BY_HEADERS, ANY, TEST = "placed", "by_headers", "any", "test"  # as metrics name them


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request as the proxy shows it; without a body, where that is not shown."""

    headers: Headers
    body: bytes | None
    subset: frozenset[str] | None
    arrived_s: float  # monotonic
    arrived_unix_s: float

    @property
    def path(self) -> str:
        """The path, as engines read it."""
        return unquote_to_bytes(self.header(b":path").partition(b"?")[0]).decode("utf-8", "replace")

    def header(self, name: bytes) -> bytes:
        """Return a header; empty where there is none."""
        return next((value for key, value in self.headers if key == name), b"")


@dataclass(slots=True, kw_only=True)
class Pick:
    """The endpoints of a request, best first, and what the proxy changes."""

    endpoints: list[str]
    request_id: str = ""
    set_headers: Headers = field(default_factory=list)  # of the request
    removed_headers: list[str] = field(default_factory=list)
    body: bytes | None = None  # None: as it is
    response_headers: Headers = field(default_factory=list)
    reader: ResponseReader | None = None
    models: tuple[str, str] | None = None  # the client's name and the one that the engine gets, where they differ

    @property
    def destination(self) -> str:
        """The endpoints as proxies take them."""
        return ",".join(self.endpoints)


class DroppedError(ApiError):
    """A request that is refused for a reason that other pickers have a name for."""

    def __init__(self, error: ApiError, reason: str) -> None:
        """Take the reply and the reason."""
        super().__init__(error.status, error.message, kind=error.kind, param=error.param)
        self.code = error.code
        self._error = error
        self.reason = reason

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply."""
        return [*self._error.headers(), (DROPPED, self.reason.encode())]


class Picker:
    """Chooses endpoints by the decisions of a driver; `len` is the number of requests with an id under way."""

    def __init__(
        self,
        settings: PickerSettings,
        driver: PlacementDriver,
        prompts: PromptTokens,
        metrics: PickerMetrics,
        tracer: RequestTracer | None = None,
    ) -> None:
        """Choose among the instances of the driver."""
        self.settings = settings
        self.metrics = metrics
        self.endpoints = EndpointTable(driver.registry)
        self._driver = driver
        self._prompts = prompts
        self._tracer = tracer
        self._time = DecisionTime(driver.core, settings.schedule_s, driver.settings.sidecar_deadline_s)
        self._request_ids: set[str] = set()

    async def pick(self, request: HttpRequest) -> Pick:
        """Choose; ApiError where the client gets a reply instead."""
        start_s = time.monotonic()
        try:
            pick, how = await self._pick(request)
        except ApiError as error:
            self._count_refusal(error)
            raise
        except Exception as error:  # noqa: BLE001 - each has a reply
            refused = self._refused(error)
            self._count_refusal(refused)
            raise refused from None
        took_s = time.monotonic() - start_s
        self.metrics.picks.labels(how).inc()
        self.metrics.decision.observe(took_s)
        if pick.reader is not None:
            pick.response_headers.append((b"x-block-decision-ms", b"%.2f" % (took_s * 1000)))
        del pick.endpoints[self.settings.max_endpoints :]
        pick.set_headers.append((ENDPOINT.encode(), pick.destination.encode()))
        set_names = {name for name, _ in pick.set_headers}
        pick.removed_headers = list(
            dict.fromkeys(name.decode() for name, _ in request.headers if name in REMOVED and name not in set_names)
        )
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "request placed", request_id=pick.request_id, endpoints=pick.destination, how=how,
                decision_ms=took_s * 1000,
            )  # fmt: skip
        return pick

    def ended(self, pick: Pick, *, is_shown: bool) -> None:
        """Take the end of a request's stream, in which the response `is_shown` up to its end, or not."""
        if pick.reader is not None:
            pick.reader.stream_ended(is_shown=is_shown)
        self._request_ids.discard(pick.request_id)

    def _count_refusal(self, error: ApiError) -> None:
        invalid = INVALID if error.status < SERVER_ERROR else FAILED
        reason = error.reason if isinstance(error, DroppedError) else invalid
        self.metrics.refused.labels(str(error.status), reason).inc()

    def _refused(self, error: Exception) -> ApiError:
        if status_of(error) is INTERNAL:
            log.error("decision failed", exc_info=error)
        refused = refusal_of(error, self._time.within_s())
        if isinstance(error, OverloadedError):
            return DroppedError(refused, DROPPED_REASONS.get(error.reason, SATURATED))
        if isinstance(error, NoInstanceError):
            return DroppedError(refused, NO_ENDPOINTS)
        if isinstance(error, TimeoutError):
            return DroppedError(refused, EXPIRED)
        return refused

    async def _pick(self, request: HttpRequest) -> tuple[Pick, str]:
        if self.settings.conformance_pool:
            selected = self.endpoints.named(entries_of(request.header(SELECTION)))
            if selected:
                return Pick(endpoints=selected, set_headers=self._id_header(request, self._id_of(request))), TEST
        excluded: frozenset[str] = frozenset()
        if request.subset is not None:
            excluded = self.endpoints.outside(request.subset)
        if len(excluded) == len(self.endpoints):
            why = "none of the endpoints that the proxy allows is known" if len(self.endpoints) else "none is known"
            raise NoInstanceError(f"no endpoint can take the request: {why}")
        endpoint = ENDPOINTS.get(request.path)
        if endpoint is not None and endpoint.kind != UNPLACED and request.header(b":method") == POST:
            if request.body is not None:
                return await self._place(request, excluded, endpoint), PLACED
            return await self._place_by_headers(request, excluded, endpoint), BY_HEADERS
        if request.body and not self.settings.allow_kv_transfer_params and names_kv_blocks(request.body):
            raise ValueError(KV_TRANSFER_REFUSED)
        return await self._place_anywhere(request, excluded), ANY

    # Requests that are forecast.

    async def _place(self, request: HttpRequest, excluded: frozenset[str], endpoint: EngineEndpoint) -> Pick:
        assert request.body is not None
        openai = endpoint.read(request.body, request.header(b"content-type"))
        if openai.has_kv_transfer_params and not self.settings.allow_kv_transfer_params:
            raise ValueError(KV_TRANSFER_REFUSED)
        body, models = request.body, None
        target = self._rewritten_model(request)
        if target and target != openai.model and openai.is_object:
            models = (openai.model, target)
            openai = replace(openai, model=target)
            body = json.dumps({**json.loads(body), "model": target}).encode()
        num_tokens, block_names = await self._prompts.read_aside(openai)
        pick = await self._placed(request, endpoint, openai, excluded, num_tokens, block_names)
        assert pick.reader is not None
        facts, decision = pick.reader.request, pick.reader.decision
        if decision.HasField("objective"):
            facts = with_objective(facts, decision.objective)
        is_own = priority_of(openai, read_headers(request.headers)) is not None
        body = body_to_pass(
            body,
            openai,
            facts,
            time.monotonic() - request.arrived_s,
            passes_priority=is_own or self._driver.settings.pass_objective_priority,
        )
        pick.body = None if body is request.body else body
        pick.models = models
        return pick

    async def _place_by_headers(self, request: HttpRequest, excluded: frozenset[str], endpoint: EngineEndpoint) -> Pick:
        """Place a request whose body is not shown: the length of its prompt is guessed from that of the body."""
        length = request.header(b"content-length")
        openai = OpenAIRequest(
            model=self._rewritten_model(request) or request.header(MODEL).decode("latin-1"),
            stream=False,
            prompt=b"",
            prompt_bytes=int(length) if length.isdigit() else 0,
            prompt_tokens=None,
            num_messages=0,
            max_tokens=1 if endpoint.kind == PREFILL_ONLY else None,
            prefill_only=endpoint.kind == PREFILL_ONLY,
            min_tokens=None,
            ignore_eos=False,
            expected_tokens=None,
            priority=None,
            hinted_priority=None,
            undivided=True,  # two legs need the body
        )
        return await self._placed(request, endpoint, openai, excluded, self._prompts.sizes.tokens(openai))

    async def _placed(  # noqa: PLR0913, PLR0917 - what is known of the request
        self,
        request: HttpRequest,
        endpoint: EngineEndpoint,
        openai: OpenAIRequest,
        excluded: frozenset[str],
        num_tokens: int,
        block_names: Sequence[bytes] = (),
    ) -> Pick:
        headers, objectives = read_headers(request.headers), self._driver.objectives
        if headers.objective and headers.objective not in objectives.objectives:  # other pickers serve it, too
            if self.settings.refuse_unknown_objectives:
                objectives.named(headers.objective, headers.objective_header)  # raises
            self.metrics.ignored_objectives.inc()
            headers = replace(headers, objective="")
        request_id = self._unique(self._id_of(request))
        spans: PickSpans | None = None
        try:
            message = request_message(openai, headers, objectives, request_id=request_id, prompt_tokens=num_tokens)
            message.arrival_unix_s = request.arrived_unix_s
            message.leg = common_pb2.LEG_SERVE if openai.undivided else common_pb2.LEG_UNSPECIFIED
            if block_names:
                message.prefix_hashes.extend(block_names)
                message.prefix_block_tokens = self._driver.settings.block_tokens
            message.waited_s = max(0.0, time.monotonic() - request.arrived_s)
            spans = PickSpans(self._tracer, request.headers, openai, message)
            async with asyncio.timeout(self._time.within_s()):
                _, decision = await spans.scheduled(
                    self._driver.place(
                        message,
                        prompt=openai.prompt,
                        excluded=excluded,
                        max_wait_s=self._time.max_wait_s(),
                        explain=headers.explain,
                    )
                )
        except BaseException as error:
            self._request_ids.discard(request_id)
            if spans is not None:
                spans.refused(refusal_of(error, self._time.within_s()).status if isinstance(error, Exception) else 0)
            raise
        return self._pick_of(request, endpoint, openai, spans, message, decision, explains=headers.explain)

    def _pick_of(  # noqa: PLR0913, PLR0917 - what is known of the request
        self,
        request: HttpRequest,
        endpoint: EngineEndpoint,
        openai: OpenAIRequest,
        spans: PickSpans,
        message: common_pb2.Request,
        decision: common_pb2.Decision,
        *,
        explains: bool,
    ) -> Pick:
        """Return what a decision means for Envoy: where the request goes, and which headers it and its reply get."""
        pick = Pick(
            endpoints=self.endpoints.serving(decision),
            request_id=message.request_id,
            set_headers=with_rank(
                [*self._id_header(request, message.request_id), *spans.chosen(decision)], rank_of(decision.instance)
            ),
            response_headers=[
                (b"x-block-instance", decision.instance.instance_id.encode("ascii", "replace")),
                (b"x-block-policy", decision.policy.encode("ascii", "replace")),
                *decision_headers(decision, explain=explains),
            ],
            reader=ResponseReader(
                driver=self._driver,
                endpoints=self.endpoints,
                metrics=self.metrics,
                spans=spans,
                sizes=self._prompts.sizes,
                form=endpoint.format,
                openai=replace(openai, prompt=b"", token_ids=(), conversation=None, xargs=None),  # what has its size
                request=message,
                decision=decision,
                arrived_s=request.arrived_s,
            ),
        )
        if decision.disaggregation:
            pick.response_headers.append(
                (b"x-block-disaggregation", decision.disaggregation.encode("ascii", "replace"))
            )
        if decision.HasField("prefill"):
            prefill = decision.prefill.instance
            pick.set_headers.append((PREFILLER.encode(), self.endpoints.endpoint_of(prefill).encode()))
            pick.response_headers.append((b"x-block-prefill-instance", prefill.instance_id.encode("ascii", "replace")))
        return pick

    # Other requests.

    async def _place_anywhere(self, request: HttpRequest, excluded: frozenset[str]) -> Pick:
        """Choose any instance, without a reservation: the request is no completion, or has no body."""
        models = self._driver.registry.directory.models()
        request_id = self._id_of(request)
        _, decision = await self._driver.place(
            common_pb2.Request(
                request_id=request_id,
                model=models[0] if len(models) > 1 else "",
                prompt_tokens=1,
                leg=common_pb2.LEG_SERVE,
            ),
            policy=ANY_POLICY,
            excluded=excluded,
            dry_run=True,
        )
        return Pick(endpoints=self.endpoints.serving(decision), set_headers=self._id_header(request, request_id))

    # Ids and models.

    @staticmethod
    def _id_of(request: HttpRequest) -> str:
        return request_id_of(request.headers) or uuid4().hex

    def _unique(self, request_id: str) -> str:
        """Return an id that no other request has while it is under way."""
        if request_id in self._request_ids:
            request_id = f"{request_id}-{uuid4().hex[:8]}"
        self._request_ids.add(request_id)
        return request_id

    @staticmethod
    def _id_header(request: HttpRequest, request_id: str) -> Headers:
        value = request_id.encode()
        return [] if request.header(REQUEST_ID) == value else [(REQUEST_ID, value)]

    @staticmethod
    def _rewritten_model(request: HttpRequest) -> str:
        named = next((value for name in REWRITE if (value := request.header(name))), b"")
        return named.decode("utf-8", "replace").strip()
