"""One answer for Generate: placed, and streamed from one engine; where it fails, another one answers or continues."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace

from prometheus_client import Counter

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.instances import OverloadedError
from scheduler.placement import Placement
from services.http.client import HttpClient
from services.http.connection import ConnectError
from services.http.continuable import IDS_FIELD
from services.http.continued_request import BY_TOKEN_IDS, OFF
from services.http.data_parallel import rank_of
from services.http.engine_deaths import POISON, EngineDeaths
from services.http.paths import CHAT
from services.http.prefill_leg import MAX_FAILED_FETCHES
from services.http.prompt_tokens import PromptSizes
from services.http.stream_continuation import Continuation, NotContinuableError, StreamTranscript
from services.instances.instance import REMOVED_FROM_LIST
from services.logs import log_event
from services.placement.current_request import NOT_PLACED, CurrentRequest
from services.placement.driver import PlacementDriver
from services.placement.engine_stream import EngineStream
from services.placement.generation_prefill import PrefillError, prefill
from services.placement.generation_spans import GenerationSpans
from services.placement.generation_tracker import GenerationTracker
from services.placement.upstream_engine import EngineError, ReportedError
from services.retry_budget import RetryBudget
from services.tracing.request_spans import MIGRATIONS

log = logging.getLogger(__name__)

PLANNED, FAILURE = "planned", "failed"  # why another engine continues, as outcomes name it
LIMIT, BUDGET, NO_INSTANCE = "limit", "migration_budget", "no_instance"  # why none does


@dataclass(slots=True, kw_only=True)
class Generation:
    """One request; `events` is its stream."""

    client: HttpClient
    attempts: Counter  # by result
    prefills: Counter  # by result
    migrations: RetryBudget
    deaths: EngineDeaths
    sizes: PromptSizes
    current: CurrentRequest
    _num_failed_fetches: int = 0
    _transcript: StreamTranscript | None = None  # of an answer that may continue on another engine
    _next: tuple[Placement, common_pb2.Decision] | None = None  # of a stream that leaves

    def __post_init__(self) -> None:
        """Follow the answer, unless it can never continue on another engine."""
        current, mode = self.current, self.driver.settings.continue_streams
        if mode == OFF or current.ask.why_not_continuable:
            return
        own, is_chat = current.engine_request, current.engine_request.path == CHAT
        hides_ids = mode == BY_TOKEN_IDS and not current.ask.returns_token_ids
        self._transcript = StreamTranscript(body=own.body_for(()), chat=is_chat, hides_ids=hides_ids)
        if hides_ids:
            current.engine_request = replace(own, body={**own.body, IDS_FIELD: True})

    @property
    def driver(self) -> PlacementDriver:
        """What places the request."""
        return self.current.driver

    @property
    def spans(self) -> GenerationSpans:
        """The spans of the call."""
        return self.current.spans

    async def events(self) -> AsyncGenerator[scheduler_pb2.GenerateResponse]:
        """Yield decisions, chunks and the outcome; EngineError where no engine can answer."""
        settings = self.driver.settings
        failure: EngineError | None = None
        attempt = 0
        while True:
            attempt += self._next is None
            placement, decision = await self._placed_next(failure)
            entered_s = self.current.arrived_s - self.current.waited_s
            tracker = GenerationTracker(decision=decision, request=self.current.message.request, entered_s=entered_s)
            try:
                yield scheduler_pb2.GenerateResponse(decision=decision)
                stream = await self._stream_of(tracker)
                async with aclosing(stream.chunks()) as chunks:
                    async for chunk in chunks:
                        if chunk is not None:
                            yield scheduler_pb2.GenerateResponse(chunk=chunk)
                        if stream.leaves and await self._moved(stream, tracker):
                            break
            except (ConnectionError, TimeoutError) as error:
                failure = await self._given_up(placement, tracker, error)
                if attempt >= settings.attempts or not self._tries_another(placement, tracker):
                    raise failure from None
                tracker.is_continued = tracker.num_chunks > 0
            else:
                if self._next is not None:
                    continue
                self.attempts.labels("ended").inc()
                self.sizes.learn(self.current.ask, tracker.prompt_tokens)
                yield scheduler_pb2.GenerateResponse(outcome=self.current.whole(tracker.outcome()))
                return
            finally:
                self._ended(tracker)

    def _ended(self, tracker: GenerationTracker) -> None:
        """Report how the attempt of one engine ended, unless that is done."""
        if not tracker.is_released:
            self.driver.outcomes.ended(tracker.outcome())
        if self.spans.request.is_recorded and not tracker.is_continued:
            self.spans.request.ended(self.current.whole(tracker.outcome()))

    async def _placed_next(self, failure: EngineError | None) -> tuple[Placement, common_pb2.Decision]:
        """Place the request; the error of an engine that failed is more precise than that there is no other one."""
        if self._next is not None:
            found, self._next = self._next, None
            return found
        try:
            return await self.current.place()
        except OverloadedError:
            raise  # says when to try again
        except ConnectionError:
            if failure is None:
                raise
            raise failure from None

    async def _given_up(self, placement: Placement, tracker: GenerationTracker, error: Exception) -> EngineError:
        """Note the failure of an engine, and return it as the client sees it."""
        self.attempts.labels("broken" if tracker.num_chunks else "failed").inc()
        failed_id = self._failed(tracker, error)
        self.deaths.failed(failed_id, error, tracker.sent_s)
        if failed_id != placement.instance_id:  # the instance of the decode leg may be chosen again
            await self.current.release(placement, None if isinstance(error, PrefillError) else tracker.outcome())
            tracker.is_released = True
        log_event(
            log, logging.INFO, "engine failed", request_id=tracker.request.request_id, instance=failed_id,
            reason=str(error), tokens=tracker.num_tokens,
        )  # fmt: skip
        return EngineError(f"{failed_id}: {error}")

    def _tries_another(self, placement: Placement, tracker: GenerationTracker) -> bool:
        """Return whether another engine may answer, or continue the answer; prepare the request for the rest."""
        had_legs = tracker.decision.HasField("prefill") or tracker.held is not None
        if not (placement.next_best or had_legs):
            return False
        if self.deaths.is_exhausted:
            tracker.migration = POISON
            return False
        return not tracker.num_chunks or self._continue(tracker)

    # Continuing.

    def _continue(self, tracker: GenerationTracker) -> bool:
        """Make the next request that for the rest of the answer; False where it cannot continue."""
        try:
            transcript, rest = self._rest_of(tracker.decision)
        except NotContinuableError as why:
            tracker.migration = str(why)
            log_event(log, logging.INFO, "stream not continued", request_id=tracker.request.request_id, why=str(why))
            return False
        tracker.migration = FAILURE
        whole = self.current.whole(tracker.outcome())
        self.current.continue_as(rest, tracker, transcript.num_tokens)
        self._record_move(whole)
        transcript.continue_as(rest)
        self.attempts.labels("continued").inc()
        return True

    async def _moved(self, stream: EngineStream, tracker: GenerationTracker) -> bool:
        """Find another instance for the rest of a stream whose own drains; False where it stays."""
        stream.leaves = False
        before, whole = copy(self.current), self.current.whole(tracker.outcome())
        left_id = tracker.decision.instance.instance_id
        try:
            transcript, rest = self._rest_of(tracker.decision)
            self.current.excluded |= {left_id}
            self.current.continue_as(rest, tracker, transcript.num_tokens)
            try:
                self._next = await self.current.place()
            except NOT_PLACED:
                self.current = before
                self.migrations.give_back()
                raise NotContinuableError(NO_INSTANCE) from None
        except NotContinuableError as why:
            if stream.movable is not None:
                self.driver.requests.cannot_move(stream.movable, str(why))
            return False
        tracker.migration, tracker.is_continued = PLANNED, True
        self._record_move(whole)
        self.attempts.labels(PLANNED).inc()
        log_event(
            log, logging.INFO, "stream continued", how=PLANNED, request_id=tracker.request.request_id,
            left_instance_id=left_id, tokens=rest.num_sent,
        )  # fmt: skip
        transcript.continue_as(rest)
        return True

    def _rest_of(self, decision: common_pb2.Decision) -> tuple[StreamTranscript, Continuation]:
        """Return the transcript of the answer, and the request for its rest.

        NotContinuableError where the answer cannot continue, or limit or budget of migrations is exhausted.
        """
        transcript = self._transcript
        if transcript is None:
            raise NotContinuableError(self.current.ask.why_not_continuable or OFF)
        if self.current.num_migrations >= self.driver.settings.max_migrations:
            raise NotContinuableError(LIMIT)
        transcript.max_model_len = decision.instance.settings.max_model_len or None
        rest = transcript.continuation()
        if not self.migrations.spend():
            raise NotContinuableError(BUDGET)
        return transcript, rest

    def _record_move(self, whole: common_pb2.Outcome) -> None:
        """Record the part of the answer that has come, and how often it has moved."""
        self.spans.request.ended(whole)
        self.spans.request.set({MIGRATIONS: self.current.num_migrations})

    # Failures.

    def _failed(self, tracker: GenerationTracker, error: Exception) -> str:
        """Exclude the instance that failed from the next decision, and return its id.

        The first failure to fetch KV blocks counts for the prefill instance.
        """
        held, decision = tracker.held, tracker.decision
        failed_id = decision.instance.instance_id
        if isinstance(error, PrefillError):
            failed_id = decision.prefill.instance.instance_id
        elif held is not None and not tracker.num_chunks and isinstance(error, ReportedError):
            self.current.held = None
            self._num_failed_fetches += 1
            if self._num_failed_fetches >= MAX_FAILED_FETCHES:
                tracker.failed()
                self.current.excluded |= {failed_id}
                self.current.undivided = True
            failed_id = held.instance_id
        else:
            tracker.failed()
            if held is not None and not held.usable_after(error):
                self.current.held = None
        self.current.excluded |= {failed_id}
        if isinstance(error, ConnectError):
            self.current.excluded |= self._ranks_beside(decision.instance)
        return failed_id

    def _ranks_beside(self, instance: common_pb2.Instance) -> set[str]:
        """Return the data-parallel ranks of an engine, which cannot be reached either where one cannot."""
        if rank_of(instance) is None:
            return set()
        handles = self.driver.registry.handles()
        return {one.name for one in handles if one.instance.engine_url == instance.engine_url}

    # Sending.

    async def _stream_of(self, tracker: GenerationTracker) -> EngineStream:
        """Have the prompt computed where the decision has a prefill leg; return the stream of the answer."""
        current, decision = self.current, tracker.decision
        handle = self.driver.registry.find(decision.instance.instance_id)
        if handle is None:
            raise EngineError(REMOVED_FROM_LIST)
        if decision.HasField("prefill"):
            current.held = await prefill(current, decision, tracker.entered_s, self.client, self.prefills)
        tracker.held = current.held
        return EngineStream(
            self.driver,
            self.client,
            self.spans,
            handle.instance,
            current.to_send,
            tracker=tracker,
            transcript=self._transcript,
        )
