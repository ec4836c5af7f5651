"""The scheduler's methods: decide, decide and stream, release."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.http.client import HttpClient
from services.http.openai_body import OpenAIRequest
from services.http.prompt_sizes import PromptSizes
from services.http.prompt_tokens import PromptTokens
from services.logs import log_event
from services.placement.settings import SchedulerSettings
from services.rpc.errors import NotAllowedError
from services.rpc.messages import require_name
from services.scheduler_server.decision_log import DecisionLog
from services.scheduler_server.decision_recorder import DecisionRecorder
from services.scheduler_server.engines import EngineError, EngineRequest, answer, question_from
from services.scheduler_server.explanation import decision_message
from services.scheduler_server.forecast_calibration import ForecastCalibration
from services.scheduler_server.generation_tracker import GenerationTracker
from services.scheduler_server.instance_handle import InstanceHandle
from services.scheduler_server.instance_registry import InstanceRegistry
from services.scheduler_server.length_resolution import BYTES_PER_TOKEN, LengthResolver
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.placement_request import BASES, Placement, PlacementRequest
from services.scheduler_server.placing import Placer
from services.scheduler_server.provisioner_reports import ProvisionerReports

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

ENDED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
PLACING = 3  # of the sidecars' deadlines that placing a request may take
OUTCOME_TIMES = ("ttft_s", "e2e_s", "tpot_s", "queue_s")


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Any of several may serve any request, and release what another has reserved."""

    def __init__(  # noqa: PLR0913, PLR0917 - all the parts of a scheduler
        self,
        settings: SchedulerSettings,
        fleet: InstanceRegistry,
        lengths: LengthResolver,
        measures: SchedulerMetrics,
        client: HttpClient,
        recorder: DecisionRecorder | None = None,
        reports: ProvisionerReports | None = None,
    ) -> None:
        """Serve a fleet."""
        self._settings = settings
        self._fleet = fleet
        self._lengths = lengths
        self._measures = measures
        self._client = client
        self._reports = reports or ProvisionerReports((), settings.scheduler_id)
        self._placer = Placer(settings, fleet, lengths, measures)
        self._expectations = ForecastCalibration(measures)
        self._recent = DecisionLog()
        self._recorder = recorder
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
        wish = PlacementRequest(
            request=request.request,
            taken_s=time.monotonic(),
            patience_s=patience(context, self._settings),
            prompt=request.prompt,
            policy=request.policy,
            excluded=frozenset(request.exclude_instance_ids),
            dry_run=request.dry_run,
        )
        require(wish)
        placement = await self._placer.place(wish)
        return scheduler_pb2.ScheduleResponse(decision=self._decision(placement, wish, explain=request.explain))

    async def Generate(
        self,
        request: scheduler_pb2.GenerateRequest,
        context: Context,
    ) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        """Decide, send the request, and stream its answer; another engine is tried as long as nothing has come."""
        question = question_from(request)
        taken_s = time.monotonic()
        ask = question.read()
        await self._measure(request.request, ask)
        wish = PlacementRequest(request=request.request, taken_s=taken_s, prompt=question.prompt, policy=request.policy)
        require(wish)
        for attempt in range(1, self._settings.attempts + 1):
            placement = await self._placer.place(wish)
            decision = self._decision(placement, wish, explain=request.explain)
            progress = GenerationTracker(decision=decision, wish=wish)
            try:
                yield scheduler_pb2.GenerateResponse(decision=decision)
                async with aclosing(self._streamed(placement.chosen, question, progress)) as chunks:
                    async for chunk in chunks:
                        yield scheduler_pb2.GenerateResponse(chunk=chunk)
            except (ConnectionError, TimeoutError) as error:
                progress.failed()
                self._measures.attempts.labels("broken" if progress.num_chunks else "failed").inc()
                others = any(sidecar is not placement.chosen for sidecar in placement.ranking)
                if progress.num_chunks or attempt == self._settings.attempts or not others:
                    raise EngineError(f"{placement.chosen.name}: {error}") from None
                log_event(
                    log, logging.INFO, "engine failed, trying another", request_id=wish.request.request_id,
                    instance=placement.chosen.name, reason=str(error),
                )  # fmt: skip
                wish.excluded = {*wish.excluded, placement.chosen.name}
            else:
                self._measures.attempts.labels("ended").inc()
                self._prompts.sizes.learn(ask, progress.prompt_tokens)
                yield scheduler_pb2.GenerateResponse(outcome=progress.outcome())
                return
            finally:
                self._end(placement.chosen, progress)

    async def _measure(self, request: common_pb2.Request, ask: OpenAIRequest) -> None:
        """Find out how long a prompt is and what its blocks are called, as far as the client has not said so."""
        if request.prompt_tokens and request.prefix_hashes:
            return
        num_tokens, names = await self._prompts.read_aside(ask)
        request.prompt_tokens = request.prompt_tokens or num_tokens
        if names and not request.prefix_hashes:
            request.prefix_hashes.extend(names)
            request.prefix_block_tokens = self._settings.block_tokens

    async def _streamed(
        self, sidecar: InstanceHandle, question: EngineRequest, progress: GenerationTracker
    ) -> AsyncGenerator[scheduler_pb2.Chunk]:
        waits = (self._settings.first_token_s, self._settings.idle_s)
        pieces = answer(self._client, sidecar.instance, question, waits)
        async with aclosing(pieces) as open_pieces:
            async for piece in open_pieces:
                progress.heard(piece)
                if piece.is_answer():
                    yield scheduler_pb2.Chunk(
                        text=piece.text,
                        token_ids=piece.token_ids,
                        num_tokens=len(piece.token_ids),
                        finish_reason=piece.finish_reason,
                    )
        progress.require_end()

    def _end(self, sidecar: InstanceHandle, progress: GenerationTracker) -> None:
        """Release in the background what a stream had reserved, however it ended."""
        outcome = progress.outcome()
        self._learn(sidecar, outcome)
        release = common_pb2.ReleaseRequest(
            request_id=outcome.request_id, instance_id=outcome.instance_id, outcome=outcome
        )
        sidecar.start(self._released(sidecar, release))

    async def Release(
        self,
        request: common_pb2.ReleaseRequest,
        context: Context,
    ) -> common_pb2.ReleaseResponse:
        """Pass the end of a request on to its instance's sidecar, and its outcome to the tagger."""
        require_name("request_id", request.request_id)
        require_name("instance_id", request.instance_id)
        if request.HasField("outcome"):
            require_outcome(request.outcome)
        sidecar = self._fleet.named(request.instance_id)
        if sidecar is None:
            self._measures.releases.labels("unknown_instance").inc()
            return common_pb2.ReleaseResponse()
        if request.HasField("outcome"):
            self._learn(sidecar, request.outcome)
        else:
            self._reports.ended(common_pb2.Outcome(request_id=request.request_id, instance_id=request.instance_id))
        return await self._released(sidecar, request)

    async def Explain(
        self,
        request: scheduler_pb2.ExplainRequest,
        context: Context,
    ) -> scheduler_pb2.ExplainResponse:
        """Tell a decision once more, with all its candidates."""
        require_name("request_id", request.request_id)
        return scheduler_pb2.ExplainResponse(decision=self._recent.explained(request.request_id))

    async def ListInstances(
        self,
        request: scheduler_pb2.ListInstancesRequest,
        context: Context,
    ) -> scheduler_pb2.ListInstancesResponse:
        """Tell which instances there are, and by which policy they are chosen."""
        return scheduler_pb2.ListInstancesResponse(
            instances=[sidecar.message for sidecar in self._fleet.everybody()],
            policy=self._placer.policy,
            scheduler_id=self._settings.scheduler_id,
        )

    async def UsePolicy(
        self,
        request: scheduler_pb2.UsePolicyRequest,
        context: Context,
    ) -> scheduler_pb2.UsePolicyResponse:
        """Decide by another policy from now on."""
        if not is_local(context.peer()):
            raise NotAllowedError("policies are switched from the scheduler's own machine only")
        before = self._placer.policy
        self._placer.use(request.policy)
        log_event(log, logging.WARNING, "policy switched", policy=request.policy, before=before)
        return scheduler_pb2.UsePolicyResponse(policy=request.policy, before=before)

    async def _released(
        self, sidecar: InstanceHandle, request: common_pb2.ReleaseRequest
    ) -> common_pb2.ReleaseResponse:
        response = await sidecar.release(request)
        self._measures.releases.labels("yes" if response.released else "no").inc()
        return response

    def _learn(self, sidecar: InstanceHandle, outcome: common_pb2.Outcome) -> None:
        self._reports.ended(outcome)
        self._expectations.ended(sidecar.name, outcome, sidecar.pace, completed=outcome.finish_reason in ENDED)
        if self._recorder is not None:
            self._recorder.ended(outcome)
        if outcome.finish_reason == common_pb2.FINISH_REASON_FAILED:
            sidecar.engine_failed()
        elif outcome.finish_reason in ENDED:
            sidecar.engine.succeeded()
            self._lengths.observe(outcome)

    def _decision(self, placement: Placement, wish: PlacementRequest, *, explain: bool) -> common_pb2.Decision:
        in_full = explain or (self._recorder is not None and self._settings.record_candidates)
        decision = decision_message(placement, wish, self._settings.scheduler_id, explain=in_full)
        self._reports.placed(wish, placement)
        if not wish.dry_run:
            if placement.forecast is not None:
                expected = self._expectations.told(decision.request_id, placement.forecast, placement.chosen.pace)
                decision.forecast.CopyFrom(expected)
            self._recent.keep(decision, placement)
            if self._recorder is not None:
                self._recorder.decided(wish.request, decision)
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "decided", request_id=decision.request_id, instance=decision.instance.instance_id,
                policy=decision.policy, basis=BASES[decision.basis], decision_ms=round(decision.decision_s * 1e3, 3),
                candidates=decision.num_candidates, skipped=decision.num_skipped, conflicts=placement.num_conflicts,
                reserved=decision.HasField("reserved_for_s"), why=decision.why,
            )  # fmt: skip
        return decision


def patience(context: Context, settings: SchedulerSettings) -> float:
    """Tell for how long a request may be held so that its caller, who has a deadline, still hears of its place."""
    left_s = context.time_remaining()
    if left_s is None:
        return math.inf
    return float(left_s) - min(left_s / 2, PLACING * settings.sidecar_deadline_s)


def is_local(peer: str) -> bool:
    """Tell whether a caller, as gRPC names it, is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or address.startswith(("127.", "[::1]"))


def require(wish: PlacementRequest) -> None:
    """Refuse a request that cannot be told from others."""
    require_name("request.request_id", wish.request.request_id)


def require_outcome(outcome: common_pb2.Outcome) -> None:
    """Refuse times that are none."""
    for name in OUTCOME_TIMES:
        value = getattr(outcome, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"outcome.{name}: must be a time from 0 on, not {value}")
