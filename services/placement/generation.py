"""One answer for Generate: placed, and streamed from one engine; where it fails, another one answers or continues."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from prometheus_client import Counter

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.instances import OverloadedError
from scheduler.placement import Placement
from services.draining_requests import REMOVED, MovableRequest
from services.http.client import ConnectError, Connection, HttpClient, origin_of
from services.http.continuable import IDS_FIELD
from services.http.continued_request import BY_TOKEN_IDS, OFF, EarlierPart, continued_request
from services.http.data_parallel import rank_of, with_rank
from services.http.engine_deaths import POISON, EngineDeaths
from services.http.kv_transfer import KV_CONNECTORS
from services.http.openai_body import OpenAIRequest
from services.http.paths import CHAT
from services.http.prefill_leg import MAX_FAILED_FETCHES, SKIPPED, HeldBlocks, PrefillLeg
from services.http.prompt_tokens import PromptSizes
from services.http.proxying import OK
from services.http.stream_continuation import Continuation, NotContinuableError, StreamTranscript
from services.logs import log_event
from services.placement.driver import PlacementDriver
from services.placement.generation_spans import GenerationSpans, answer_recorded
from services.placement.generation_tracker import GenerationTracker
from services.placement.upstream_engine import (
    MAX_ERROR_BYTES,
    EngineError,
    EngineRequest,
    ReportedError,
    error_of,
    stream_answer,
)
from services.retry_budget import RetryBudget
from services.rpc.errors import BusyError, UnknownNameError
from services.rpc.objectives import with_objective
from services.tracing.request_spans import DECODE, MIGRATIONS, PREFILL, SERVE, end_prefill

log = logging.getLogger(__name__)

MAX_PREFILL_BYTES = 16 * 2**20  # of a reply
CUT = "length"  # why an answer ends that has as many tokens as it may
PLANNED, FAILURE = "planned", "failed"  # why another engine continues, as outcomes name it
LIMIT, BUDGET, NO_INSTANCE = "limit", "migration_budget", "no_instance"  # why none does
NOT_PLACED = (ConnectionError, ValueError, TimeoutError, UnknownNameError, BusyError)  # errors of decisions
OF_THE_REST = (  # what a request for the rest of an answer changes
    "_num_migrations", "_earlier", "message", "engine_request", "ask", "_undivided", "_held", "arrived_s", "waited_s",
    "_excluded", "_to_send",
)  # fmt: skip


class PrefillError(EngineError):
    """The instance of the prefill leg failed."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request; `events` is its stream."""

    driver: PlacementDriver
    client: HttpClient
    attempts: Counter  # by result
    prefills: Counter  # by result
    migrations: RetryBudget
    deaths: EngineDeaths
    sizes: PromptSizes
    engine_request: EngineRequest
    ask: OpenAIRequest  # what placing needs of it
    message: scheduler_pb2.GenerateRequest
    arrived_s: float  # monotonic
    waited_s: float  # before that
    spans: GenerationSpans
    _excluded: frozenset[str] = frozenset()
    _held: HeldBlocks | None = None  # by the instance of a prefill leg, not fetched yet
    _num_failed_fetches: int = 0
    _undivided: bool = False  # one engine serves it
    _transcript: StreamTranscript | None = None  # of an answer that may continue on another engine
    _hides_ids: bool = False  # engines return token ids that the client did not ask for
    _earlier: EarlierPart | None = None  # from engines that failed
    _num_migrations: int = 0
    _movable: MovableRequest | None = None  # at the instance that answers now
    _leaves: bool = False  # the instance drains, and the stream has been asked to leave it
    _is_forced: bool = False  # the instance is removed
    _connection: Connection | None = None  # to the engine that answers now
    _next: tuple[Placement, common_pb2.Decision] | None = None  # of a stream that leaves
    _to_send: EngineRequest = field(init=False)  # with the facts of the request as the last decision has them

    def __post_init__(self) -> None:
        """Some requests have one leg only, and some cannot continue on another engine."""
        self._undivided = self.ask.undivided
        mode = self.driver.settings.continue_streams
        if mode == OFF or self.ask.why_not_continuable:
            return
        own, is_chat = self.engine_request, self.engine_request.path == CHAT
        self._hides_ids = mode == BY_TOKEN_IDS and not self.ask.returns_token_ids
        self._transcript = StreamTranscript(body=own.body_for(()), chat=is_chat, hides_ids=self._hides_ids)
        if self._hides_ids:
            self.engine_request = replace(own, body={**own.body, IDS_FIELD: True})

    async def events(self) -> AsyncGenerator[scheduler_pb2.GenerateResponse]:
        """Yield decisions, chunks and the outcome; EngineError where no engine can answer."""
        settings = self.driver.settings
        failure: EngineError | None = None
        attempt = 0
        while True:
            attempt += self._next is None
            placement, decision = await self._placed_next(failure)
            entered_s = self.arrived_s - self.waited_s
            tracker = GenerationTracker(decision=decision, request=self.message.request, entered_s=entered_s)
            try:
                yield scheduler_pb2.GenerateResponse(decision=decision)
                async with aclosing(self._streamed(decision, tracker)) as chunks:
                    async for chunk in chunks:
                        if chunk is not None:
                            yield scheduler_pb2.GenerateResponse(chunk=chunk)
                        if self._leaves and await self._moved(decision, tracker):
                            break
            except (ConnectionError, TimeoutError) as error:
                failure = await self._given_up(placement, decision, tracker, error)
                if attempt >= settings.attempts or not self._tries_another(placement, decision, tracker):
                    raise failure from None
                tracker.is_continued = tracker.num_chunks > 0
            else:
                if self._next is not None:
                    continue
                self.attempts.labels("ended").inc()
                self.sizes.learn(self.ask, tracker.prompt_tokens)
                yield scheduler_pb2.GenerateResponse(outcome=self._whole(tracker.outcome()))
                return
            finally:
                self._ended(tracker)

    def _ended(self, tracker: GenerationTracker) -> None:
        """Report how the attempt of one engine ended, unless that is done."""
        if not tracker.is_released:
            self.driver.ended(tracker.outcome())
        if self.spans.request.is_recorded and not tracker.is_continued:
            self.spans.request.ended(self._whole(tracker.outcome()))

    async def _placed_next(self, failure: EngineError | None) -> tuple[Placement, common_pb2.Decision]:
        """Place the request; the error of an engine that failed is more precise than that there is no other one."""
        if self._next is not None:
            found, self._next = self._next, None
            return found
        try:
            return await self._place()
        except OverloadedError:
            raise  # says when to try again
        except ConnectionError:
            if failure is None:
                raise
            raise failure from None

    async def _given_up(
        self, placement: Placement, decision: common_pb2.Decision, tracker: GenerationTracker, error: Exception
    ) -> EngineError:
        """Note the failure of an engine, and return it as the client sees it."""
        self.attempts.labels("broken" if tracker.num_chunks else "failed").inc()
        failed_id = self._failed(decision, tracker, error)
        self.deaths.failed(failed_id, error, tracker.sent_s)
        if failed_id != placement.instance_id:  # the instance of the decode leg may be chosen again
            await self._release(placement, None if isinstance(error, PrefillError) else tracker.outcome())
            tracker.is_released = True
        log_event(
            log, logging.INFO, "engine failed", request_id=tracker.request.request_id, instance=failed_id,
            reason=str(error), tokens=tracker.num_tokens,
        )  # fmt: skip
        return EngineError(f"{failed_id}: {error}")

    def _tries_another(self, placement: Placement, decision: common_pb2.Decision, tracker: GenerationTracker) -> bool:
        """Whether another engine may answer, or go on with the answer."""
        had_legs = decision.HasField("prefill") or tracker.held is not None
        if not (placement.next_best or had_legs):
            return False
        if self.deaths.is_exhausted:
            tracker.migration = POISON
            return False
        return not tracker.num_chunks or self._continue(decision, tracker)

    # Continuing.

    def _continue(self, decision: common_pb2.Decision, tracker: GenerationTracker) -> bool:
        """Ask for the rest of the answer from now on; False where it cannot continue."""
        try:
            rest = self._rest_of(decision)
        except NotContinuableError as why:
            tracker.migration = str(why)
            log_event(log, logging.INFO, "stream not continued", request_id=tracker.request.request_id, why=str(why))
            return False
        tracker.migration = FAILURE
        whole = self._whole(tracker.outcome())
        self._continue_as(rest, decision, tracker)
        self._record_move(whole)
        assert self._transcript is not None
        self._transcript.continue_as(rest)
        self.attempts.labels("continued").inc()
        return True

    async def _moved(self, decision: common_pb2.Decision, tracker: GenerationTracker) -> bool:
        """Find another instance for the rest of a stream whose own drains; False where it stays."""
        self._leaves = False
        before, whole = {name: getattr(self, name) for name in OF_THE_REST}, self._whole(tracker.outcome())
        try:
            rest = self._rest_of(decision)
            self._excluded |= {decision.instance.instance_id}
            self._continue_as(rest, decision, tracker)
            try:
                self._next = await self._place()
            except NOT_PLACED:
                for name, value in before.items():
                    setattr(self, name, value)
                self.migrations.give_back()
                raise NotContinuableError(NO_INSTANCE) from None
        except NotContinuableError as why:
            if self._movable is not None:
                self.driver.requests.cannot_move(self._movable, str(why))
            return False
        tracker.migration, tracker.is_continued = PLANNED, True
        self._record_move(whole)
        self.attempts.labels(PLANNED).inc()
        log_event(
            log, logging.INFO, "stream continued", how=PLANNED, request_id=tracker.request.request_id,
            left_instance_id=decision.instance.instance_id, tokens=rest.num_sent,
        )  # fmt: skip
        assert self._transcript is not None
        self._transcript.continue_as(rest)
        return True

    def _rest_of(self, decision: common_pb2.Decision) -> Continuation:
        """Return the request for the rest of the answer, within limits and budget; NotContinuableError without."""
        transcript = self._transcript
        if transcript is None:
            raise NotContinuableError(self.ask.why_not_continuable or OFF)
        if self._num_migrations >= self.driver.settings.max_migrations:
            raise NotContinuableError(LIMIT)
        transcript.max_model_len = decision.instance.settings.max_model_len or None
        rest = transcript.continuation()
        if not self.migrations.spend():
            raise NotContinuableError(BUDGET)
        return rest

    def _record_move(self, whole: common_pb2.Outcome) -> None:
        """Record the part of the answer that has come, and how often it has moved."""
        self.spans.request.ended(whole)
        self.spans.request.set({MIGRATIONS: self._num_migrations})

    def _continue_as(self, rest: Continuation, decision: common_pb2.Decision, tracker: GenerationTracker) -> None:
        """Make the request for the rest the one that is placed and sent next."""
        transcript, now_s = self._transcript, time.monotonic()
        assert transcript is not None
        self._num_migrations += 1
        whole = self._whole(tracker.outcome())
        self._earlier = EarlierPart(
            arrived_s=tracker.entered_s if self._earlier is None else self._earlier.arrived_s,
            ttft_s=whole.ttft_s if whole.HasField("ttft_s") else None,
            prompt_tokens=whole.prompt_tokens,
            num_tokens=transcript.num_tokens,
        )
        request = continued_request(
            self.message.request,
            rest,
            number=self._num_migrations,
            elapsed_s=now_s - tracker.entered_s,
            tag=decision.tag if decision.HasField("tag") else None,
        )
        self.message = scheduler_pb2.GenerateRequest(
            request=request, policy=self.message.policy, explain=self.message.explain
        )
        self.engine_request = EngineRequest(
            path=rest.path,
            body=json.loads(rest.body),
            request_id=request.request_id,
            prompt=b"",
            output_tokens=self.engine_request.output_tokens,
        )
        self.ask = self.engine_request.read()
        self._undivided, self._held = self.ask.undivided, None
        self.arrived_s, self.waited_s = now_s, 0.0

    def _whole(self, outcome: common_pb2.Outcome) -> common_pb2.Outcome:
        """Return the outcome of the whole answer, of which `outcome` is that of the last engine."""
        return outcome if self._earlier is None else self._earlier.whole(outcome, self.arrived_s - self.waited_s)

    # Placing.

    async def _place(self) -> tuple[Placement, common_pb2.Decision]:
        """Find another decode instance while KV blocks are held; otherwise, place the request again."""
        if self._held is not None:
            try:
                placement, decision = await self._placed(common_pb2.LEG_DECODE)
            except NOT_PLACED:
                pass  # no other one, or none that serves such a request
            else:
                if self._held.may_be_fetched(time.monotonic(), self.driver.settings.hand_over_deadline_s):
                    return placement, decision
                await self._release(placement, None)
            self._held = None
        return await self._placed(common_pb2.LEG_SERVE if self._undivided else common_pb2.LEG_UNSPECIFIED)

    async def _placed(self, leg: common_pb2.Leg.ValueType) -> tuple[Placement, common_pb2.Decision]:
        message, request = self.message, self.message.request
        request.waited_s, request.leg, request.in_s = self.waited_s, leg, 0.0
        request.ClearField("held_s")
        placement, decision = await self.spans.request.scheduled(
            self.driver.place(
                request,
                prompt=self.engine_request.prompt,
                policy=message.policy,
                excluded=self._excluded,
                explain=message.explain,
                arrived_s=self.arrived_s,
            )
        )
        facts = with_objective(request, decision.objective) if decision.HasField("objective") else request
        waited_s = self.waited_s + time.monotonic() - self.arrived_s
        self._to_send = self.engine_request.with_facts(facts, waited_s, is_demoted=decision.demoted)
        return placement, decision

    async def _release(self, placement: Placement, outcome: common_pb2.Outcome | None) -> None:
        await self.driver.release(
            common_pb2.ReleaseRequest(
                request_id=self.message.request.request_id, instance_id=placement.instance_id, outcome=outcome
            )
        )

    def _failed(self, decision: common_pb2.Decision, tracker: GenerationTracker, error: Exception) -> str:
        """Exclude the instance that failed from the next decision, and return its id.

        The first failure to fetch KV blocks counts for the prefill instance.
        """
        held, failed_id = tracker.held, decision.instance.instance_id
        if isinstance(error, PrefillError):
            failed_id = decision.prefill.instance.instance_id
        elif held is not None and not tracker.num_chunks and isinstance(error, ReportedError):
            self._held = None
            self._num_failed_fetches += 1
            if self._num_failed_fetches >= MAX_FAILED_FETCHES:
                tracker.failed()
                self._excluded |= {failed_id}
                self._undivided = True
            failed_id = held.instance_id
        else:
            tracker.failed()
            if held is not None and not held.usable_after(error):
                self._held = None
        self._excluded |= {failed_id}
        if isinstance(error, ConnectError):
            self._excluded |= self._ranks_beside(decision.instance)
        return failed_id

    def _ranks_beside(self, instance: common_pb2.Instance) -> set[str]:
        """Return the data-parallel ranks of an engine, which cannot be reached either where one cannot."""
        if rank_of(instance) is None:
            return set()
        handles = self.driver.registry.handles()
        return {one.name for one in handles if one.instance.engine_url == instance.engine_url}

    # Sending.

    async def _streamed(
        self, decision: common_pb2.Decision, tracker: GenerationTracker
    ) -> AsyncGenerator[scheduler_pb2.Chunk | None]:
        """Yield the answer's chunks, and None where the wait for the next one was interrupted."""
        handle = self.driver.registry.find(decision.instance.instance_id)
        if handle is None:
            raise EngineError("instance was removed from the list")
        if decision.HasField("prefill"):
            await self._prefill(decision, tracker.entered_s)
        tracker.held = held = self._held
        settings = self.driver.settings
        self._leaves = self._is_forced = False
        self._connection = None
        self._movable = movable = self.driver.requests.enter(
            decision.instance.instance_id, self._leave if held is None else None, self._force
        )
        leg = self.spans.leg(SERVE if held is None else DECODE, decision.instance, decision.policy)
        pieces = stream_answer(
            self.client,
            handle.instance,
            self.spans.traced(self._to_send, leg),
            (settings.first_token_s, settings.idle_s),
            prompt=None if held is None else held.prompt,
            sent=tracker.sent,
            received=self._received,
            opened=self._opened,
        )
        with answer_recorded(leg, tracker):
            try:
                async with aclosing(pieces) as open_pieces:
                    async for piece in open_pieces:
                        if self._is_forced:
                            raise EngineError(REMOVED)
                        tracker.received(piece)
                        if self._leaves and not piece.is_answer():
                            yield None
                        if piece.is_answer():
                            yield scheduler_pb2.Chunk(
                                text=piece.text,
                                token_ids=() if self._hides_ids else piece.token_ids,
                                num_tokens=len(piece.token_ids),
                                finish_reason=piece.finish_reason,
                                index=piece.index,
                            )
            except (ConnectionError, TimeoutError):
                if not tracker.is_complete:  # only the usage is missing
                    if not self._has_all_of(tracker):
                        raise
                    yield scheduler_pb2.Chunk(finish_reason=CUT)
            finally:
                movable.end()
            tracker.require_end()

    def _has_all_of(self, tracker: GenerationTracker) -> bool:
        """Whether all tokens have come that the request allows, so that only the reason for the end is missing."""
        if self._transcript is None or self._transcript.end() is None:
            return False
        tracker.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return True

    def _opened(self, connection: Connection) -> None:
        self._connection = connection

    def _leave(self) -> None:
        self._leaves = True
        if self._connection is not None:
            self._connection.interrupt()

    def _force(self) -> None:
        self._is_forced = True
        if self._connection is not None:
            self._connection.interrupt()

    def _received(self, event: bytes) -> None:
        if self._transcript is not None:
            self._transcript.passed(b"data: " + event + b"\n\n")

    async def _prefill(self, decision: common_pb2.Decision, entered_s: float) -> None:
        """Have the prompt computed, unless one engine serves the request."""
        settings, instance_id = self.driver.settings, decision.prefill.instance.instance_id
        leg = PrefillLeg(
            request=self.message.request, instance_id=instance_id, policy=decision.policy, arrived_s=entered_s
        )
        span = None
        try:
            if self._undivided or self._held is not None:
                leg.result = SKIPPED
                return
            handle = self.driver.registry.find(instance_id)
            if handle is None:
                raise PrefillError("instance was removed from the list")
            span = self.spans.leg(PREFILL, decision.prefill.instance, decision.policy)
            reply = await leg.send(
                self.client,
                origin_of(handle.instance.engine_url),
                target=self._to_send.path,
                headers=with_rank(self.spans.traced(self._to_send, span).headers(), handle.instance.data_parallel_rank),
                body=self._to_send.body_for(handle.instance.models),
                connector=KV_CONNECTORS[settings.kv_connector],
                within_s=settings.first_token_s,
                max_bytes=MAX_PREFILL_BYTES,
            )
        except (ConnectionError, TimeoutError) as error:
            raise PrefillError(str(error) or "the engine did not answer in time") from None
        finally:
            self.prefills.labels(leg.result).inc()
            end_prefill(span, leg.result)
            self.driver.ended(leg.outcome())
        if reply.status != OK:
            refusal = error_of(reply.status, reply.body[:MAX_ERROR_BYTES])
            raise PrefillError(str(refusal)) if isinstance(refusal, EngineError) else refusal
        self._held = leg.held
