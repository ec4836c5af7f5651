"""block.v1.Scheduler: schedule, schedule and stream, release, explain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry, Counter

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.prefix.prompt import BYTES_PER_TOKEN
from services.http.client import HttpClient
from services.http.engine_deaths import EngineDeaths
from services.http.openai_body import OpenAIRequest
from services.http.prompt_tokens import PromptSizes, PromptTokens
from services.http.request_facts import prompt_messages
from services.http.trace_context import TRACEPARENT, trace_parent_from
from services.logs import log_event
from services.placement.current_request import CurrentRequest
from services.placement.decision_time import longest_wait_s, max_wait_s, schedule_s_of
from services.placement.driver import PlacementDriver
from services.placement.generation import Generation
from services.placement.generation_spans import CANCELLED, GenerationSpans, bytes_of
from services.placement.upstream_engine import engine_request_from
from services.retry_budget import RetryBudget
from services.rpc.errors import status_of
from services.rpc.messages import require_name
from services.tracing.attributes import decision_attributes

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan, RequestTracer

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
ENDLESS = ("/block.v1.Scheduler/Tail", "/block.v1.Scheduler/WatchDrains")  # streams that end when the caller leaves
MAX_MIGRATIONS_AT_ONCE = 1024  # that are free
REPEAT_S = 5.0  # between two messages about drains where nothing changes
MAX_WARNED = 1000  # callers; more get no warning


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Any scheduler may serve any request, and release what another one reserved."""

    def __init__(
        self,
        driver: PlacementDriver,
        client: HttpClient,
        registry: CollectorRegistry,
        tracer: RequestTracer | None = None,
    ) -> None:
        """Serve the decisions of a driver; `client` sends requests to engines."""
        self._tracer = tracer
        settings = driver.settings
        self._driver = driver
        self._settings = settings
        self._client = client
        self._warned: set[str] = set()  # callers that wait for less time than the policy may hold a request
        self._attempts = Counter(
            "block_generate_attempts", "Engines tried for streams, by result.", ("result",), registry=registry
        )
        self._poison_suspects = Counter(
            "block_generate_poison_suspects",
            "Requests of Generate of which two engines failed within 10 s after they got them.",
            registry=registry,
        )
        self._migrations = RetryBudget(max_retries=MAX_MIGRATIONS_AT_ONCE, per_request=settings.migration_ratio)
        self._prefills = Counter(
            "block_generate_prefill_legs",
            "Prefill legs of streams: KV blocks are held (held) or not (no_blocks), the reply is invalid, the request "
            "is refused, the instance failed, the leg is skipped because one engine serves the request, or the client "
            "left.",
            ("result",),
            registry=registry,
        )
        self._prompts = PromptTokens(
            PromptSizes(BYTES_PER_TOKEN),
            tokenizer=settings.tokenizer,
            chat_template=settings.chat_template,
            block_tokens=settings.block_tokens,
            seed=settings.hash_seed,
        )

    async def Schedule(
        self,
        request: scheduler_pb2.ScheduleRequest,
        context: Context,
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide, and reserve at the chosen instance."""
        waits_s = max_wait_s(context.time_remaining(), self._deadline_s)
        self._warn_of_short_wait(request, context, waits_s)
        span = None if self._tracer is None else started_span(self._tracer, "Schedule", context)
        if span is None:
            return scheduler_pb2.ScheduleResponse(decision=await self._driver.schedule(request, waits_s))
        error = ""
        try:
            decision = await self._driver.schedule(request, waits_s)
            span.set(decision_attributes(decision))
        except BaseException as failure:
            error = status_of(failure).grpc_code.name if isinstance(failure, Exception) else CANCELLED
            raise
        finally:
            span.end(error)
        return scheduler_pb2.ScheduleResponse(decision=decision)

    def _warn_of_short_wait(self, request: scheduler_pb2.ScheduleRequest, context: Context, waits_s: float) -> None:
        """Log, once for each caller, that it waits for less time than the policy may hold a request."""
        policy = self._driver.core.policy
        if request.policy or request.dry_run or waits_s >= longest_wait_s(policy):
            return
        caller = str(context.peer()).rpartition(":")[0]
        if caller not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(caller)
            log_event(
                log, logging.WARNING, "caller waits for less time than the policy holds requests", caller=caller,
                waits_s=round(waits_s, 3), policy=policy.text, holds_s=longest_wait_s(policy),
                set_in_gateway=f"--schedule-s {schedule_s_of(policy):g}",
            )  # fmt: skip

    async def Tail(
        self,
        request: scheduler_pb2.TailRequest,
        context: Context,
    ) -> AsyncIterator[scheduler_pb2.TailResponse]:
        """Stream what the live page shows."""
        with self._driver.tail.watched() as reader:
            async with aclosing(reader.frames()) as frames:
                async for frame in frames:
                    yield scheduler_pb2.TailResponse(frame_json=frame)

    async def WatchDrains(
        self,
        request: scheduler_pb2.WatchDrainsRequest,
        context: Context,
    ) -> AsyncIterator[scheduler_pb2.WatchDrainsResponse]:
        """Stream which instances drain."""
        changed = asyncio.Event()
        with self._driver.registry.drains_followed(lambda _: changed.set()):
            while True:
                changed.clear()
                draining = (handle for handle in self._driver.registry.handles() if handle.status.is_draining)
                yield scheduler_pb2.WatchDrainsResponse(
                    instances=[handle.message for handle in draining], now_unix_s=time.time()
                )
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPEAT_S):
                        await changed.wait()

    @property
    def driver(self) -> PlacementDriver:
        """What decides."""
        return self._driver

    @property
    def _deadline_s(self) -> float:
        return self._settings.sidecar_deadline_s

    async def Generate(
        self,
        request: scheduler_pb2.GenerateRequest,
        context: Context,
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        """Decide, send the request, and stream its answer; until the first token another engine may be tried."""
        arrived_s, arrived_unix_s = time.monotonic(), time.time()
        engine_request = engine_request_from(request)
        ask = engine_request.read()
        waited_s = request.request.waited_s
        await self._measure(request.request, ask)
        self._migrations.earn()
        metadata = context.invocation_metadata() or ()
        spans = GenerationSpans(self._tracer, metadata, ask, request.request, arrived_unix_s=arrived_unix_s)
        generation = Generation(
            client=self._client,
            attempts=self._attempts,
            prefills=self._prefills,
            migrations=self._migrations,
            deaths=EngineDeaths(
                request_id=request.request.request_id,
                limit=self._settings.max_migrations + 1,
                suspected=self._poison_suspects.inc,
            ),
            sizes=self._prompts.sizes,
            current=CurrentRequest(
                driver=self._driver,
                spans=spans,
                engine_request=engine_request,
                ask=ask,
                message=request,
                arrived_s=arrived_s,
                waited_s=waited_s,
            ),
        )
        with spans.recorded(f"{SERVICE}/Generate"):
            async with aclosing(generation.events()) as events:
                async for event in events:
                    yield event

    async def _measure(self, request: common_pb2.Request, ask: OpenAIRequest) -> None:
        """Find out the length of a prompt and the names of its blocks, as far as the client did not give them."""
        request.grammar = request.grammar or ask.grammar
        if request.prompts and len(request.prompts) != ask.num_prompts:
            raise ValueError(f"request.prompts: are {len(request.prompts)}, but the input has {ask.num_prompts}")
        if request.prompt_tokens and request.prefix_hashes and ask.num_prompts == 1:
            return
        num_tokens, names = await self._prompts.read_aside(ask)
        request.prompt_tokens = request.prompt_tokens or num_tokens
        if ask.num_prompts > 1 and not request.prompts:
            request.num_prompts = ask.num_prompts
            request.prompts.extend(prompt_messages(ask, request.prompt_tokens))
        if names and not request.prefix_hashes:
            request.prefix_hashes.extend(names)
            request.prefix_block_tokens = self._settings.block_tokens

    async def Release(
        self,
        request: common_pb2.ReleaseRequest,
        context: Context,
    ) -> common_pb2.ReleaseResponse:
        """Pass the end of a request on to its instance's sidecar, and its outcome to the tagger."""
        return await self._driver.outcomes.release(request)

    async def Explain(
        self,
        request: scheduler_pb2.ExplainRequest,
        context: Context,
    ) -> scheduler_pb2.ExplainResponse:
        """Return a decision once more, with all its candidates."""
        require_name("request_id", request.request_id)
        return scheduler_pb2.ExplainResponse(decision=self._driver.log.explained(request.request_id))

    async def ListInstances(
        self,
        request: scheduler_pb2.ListInstancesRequest,
        context: Context,
    ) -> scheduler_pb2.ListInstancesResponse:
        """Return all instances, and the policy by which they are chosen."""
        return scheduler_pb2.ListInstancesResponse(
            instances=[handle.message for handle in self._driver.registry.handles()],
            policy=self._driver.policy,
            scheduler_id=self._settings.scheduler_id,
        )

    async def UsePolicy(
        self,
        request: scheduler_pb2.UsePolicyRequest,
        context: Context,
    ) -> scheduler_pb2.UsePolicyResponse:
        """Decide by another policy from now on."""
        before = self._driver.policy
        self._driver.use_policy(request.policy)
        log_event(log, logging.WARNING, "policy switched", policy=self._driver.policy, before=before)
        return scheduler_pb2.UsePolicyResponse(policy=request.policy, before=before)


def started_span(tracer: RequestTracer, method: str, context: Context) -> ActiveSpan | None:
    """Start the span of a call, below that of its caller; None where the call is not sampled."""
    metadata = context.invocation_metadata() or ()
    parent = next((value for name, value in metadata if name == TRACEPARENT.decode()), "")
    attributes = {"rpc.system.name": "grpc", "rpc.method": f"{SERVICE}/{method}"}
    return tracer.begin(f"{SERVICE}/{method}", trace_parent_from(bytes_of(parent)), attributes, time.time())
