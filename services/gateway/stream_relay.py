"""Passing a stream on to its client, and continuing it on another engine where its own fails, or drains."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.gateway.attainment import StreamAttainment
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming, continued
from services.gateway.upstream_attempt import UpstreamAttempt
from services.http.application import Call
from services.http.connection import ReadInterruptedError
from services.http.continued_request import OFF, EarlierPart
from services.http.engine_deaths import POISON, EngineDeaths
from services.http.errors import ApiError
from services.http.headers import Headers
from services.http.proxying import engine_error
from services.http.reply_format import CANCELLED, FAILED
from services.http.stream_continuation import Continuation, NotContinuableError, StreamTranscript, failure_in
from services.instances.draining_requests import REMOVED
from services.logs import log_event
from services.tracing.request_spans import MIGRATIONS

log = logging.getLogger(__name__)

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH

CONTINUED, ENDED, PLANNED = "continued", "ended", "planned"
FAILURE = "failed"  # why another engine continues, as outcomes name it
LIMIT, BUDGET, NO_INSTANCE = "limit", "migration_budget", "no_instance"  # why none does
REASONS = {"stop": STOP, "tool_calls": STOP}

# Sends a request that continues a stream, by its earlier part and the instances that it left; ApiError where none can.
Forward = Callable[[Incoming, EarlierPart, list[str]], Awaitable[UpstreamAttempt]]


class ReportedFailureError(ConnectionError):
    """An engine reports in its stream that it failed."""

    def __init__(self, events: bytes) -> None:
        """Keep the events that report it."""
        super().__init__("the engine reports that it failed")
        self.events = events


@dataclass(slots=True, kw_only=True)
class StreamRelay:
    """Passes one stream on; its client sees one stream, from however many engines."""

    context: GatewayContext
    incoming: Incoming
    call: Call
    attempt: UpstreamAttempt
    forward: Forward
    deaths: EngineDeaths
    attainment: StreamAttainment | None = None
    _transcript: StreamTranscript | None = None
    _num_migrations: int = 0
    _left: list[str] = field(default_factory=list)  # instances that failed, or drain
    _leaves: bool = False  # the instance drains, and the stream has been asked to leave it

    def __post_init__(self) -> None:
        """Follow the answer, unless it can never continue."""
        openai, decision = self.incoming.openai, self.attempt.destination.decision
        mode = self.context.settings.continue_streams
        if mode == OFF or openai.why_not_continuable:
            return
        self._transcript = StreamTranscript(
            body=self.incoming.own_body,
            chat=self.incoming.endpoint.is_chat,
            max_model_len=None if decision is None else decision.instance.settings.max_model_len or None,
            hides_ids=self.incoming.hides_token_ids,
        )

    async def run(self, headers: Headers) -> None:
        """Pass on the stream to its end; ApiError where it breaks."""
        await self.call.start(self.attempt.status, headers)
        self._follow_drain()
        try:
            while True:
                try:
                    await self._pass_on()
                except (ConnectionError, TimeoutError) as error:
                    if await self._continues(error):
                        continue
                return
        finally:
            self.attempt.finish(CANCELLED)  # unless it is finished already
            self.attempt.count_end(CANCELLED)  # where the client left before another engine continued

    async def _pass_on(self) -> None:
        """Pass on what the engine sends, to its end; another one may take its place meanwhile."""
        events: bytes | None = self.attempt.body
        while events is not None:
            if events:
                await self._write(events)
            if self._leaves and await self._moved():
                events = self.attempt.body
                continue
            try:
                events = await self.attempt.events()
            except ReadInterruptedError:
                events = b""
        attempt = self.attempt
        rest = self._passed(attempt.rest())
        attempt.finish()
        attempt.count_attainment()
        await self.call.end(rest)

    async def _write(self, events: bytes) -> None:
        if self._transcript is None:
            await self.call.write(events)
            return
        cut = failure_in(events)
        seen = self._passed(events if cut < 0 else events[:cut])
        if seen:
            await self.call.write(seen)
        if cut >= 0:
            raise ReportedFailureError(events[cut:])

    def _passed(self, events: bytes) -> bytes:
        """Return events as the client gets them; ConnectionError where they cannot be rewritten."""
        if self._transcript is None:
            return events
        try:
            return self._transcript.passed(events)
        except NotContinuableError as why:
            raise ConnectionError(str(why)) from None

    # The engine failed.

    async def _continues(self, error: Exception) -> bool:
        """Have another engine continue the stream; False where it has ended now; ApiError where it breaks."""
        context, attempt = self.context, self.attempt
        failed_s = time.monotonic()
        instance_id = attempt.destination.instance_id
        transcript = self._transcript
        self._note_failure(error)
        try:
            end = None if transcript is None else transcript.end()
            if transcript is not None and end is not None:  # the answer is complete
                attempt.finish(REASONS.get(transcript.finish_reason, LENGTH))
                attempt.count_attainment()
                context.metrics.migrations.labels(ENDED).inc()
                await self.call.end(end)
                return False
            if transcript is None:
                raise NotContinuableError(self.incoming.openai.why_not_continuable or OFF)
            await self._continue(transcript)
        except NotContinuableError as why:
            context.metrics.migrations.labels(str(why)).inc()
            context.metrics.broken.inc()
            log_event(
                log, logging.WARNING, "stream broken", request_id=self.incoming.request.request_id,
                instance_id=instance_id, why=str(error), not_continued_because=str(why),
            )  # fmt: skip
            attempt.migration = str(why)
            attempt.finish(FAILED)
            attempt.count_end(FAILED)
            attempt.count_attainment(broken=True)
            if isinstance(error, ReportedFailureError):
                await self.call.end(error.events)
                return False
            raise self._as_reply(error) from None
        self._count_move(CONTINUED, instance_id, failed_s, transcript.num_tokens, str(error))
        await self.call.write(b": x-block-migrations: %d\n\n" % self._num_migrations)
        return True

    def _note_failure(self, error: Exception) -> None:
        """Avoid the instance, unless it was the plan that it ends."""
        instance_id = self.attempt.destination.instance_id
        self._left.append(instance_id)
        if self.attempt.is_forced:
            return
        self.context.failed_lately.failed(instance_id)
        self.deaths.failed(instance_id, error, self.attempt.sent_s)

    def _as_reply(self, error: Exception) -> ApiError:
        return ApiError(503, REMOVED) if self.attempt.is_forced else engine_error(error)

    async def _continue(self, transcript: StreamTranscript) -> None:
        """Replace the attempt by one on another engine; NotContinuableError where there is none."""
        attempt = self.attempt
        rest = self._rest_of(transcript)
        self._num_migrations += 1
        self.incoming.spans.set({MIGRATIONS: self._num_migrations})
        earlier = attempt.part_so_far(transcript.num_tokens)
        attempt.migration = FAILURE
        attempt.finish(FAILED, counts=False)
        attempt.continue_attainment(transcript.num_tokens)
        incoming = self._incoming_for(rest)
        transcript.continue_as(rest)
        self.attempt = await self._forwarded(incoming, earlier)
        self.attempt.take_attainment(self.attainment)
        self._follow_drain()

    def _rest_of(self, transcript: StreamTranscript) -> Continuation:
        """Return the request for the rest of the answer, within limits and budget; NotContinuableError without."""
        if self._num_migrations >= self.context.settings.max_migrations:
            raise NotContinuableError(LIMIT)
        if self.deaths.is_exhausted:
            raise NotContinuableError(POISON)
        rest = transcript.continuation()
        if not self.context.migrations.spend():
            raise NotContinuableError(BUDGET)
        return rest

    def _incoming_for(self, rest: Continuation) -> Incoming:
        decision = self.attempt.destination.decision
        return continued(
            self.incoming,
            rest,
            number=self._num_migrations,
            tag=decision.tag if decision is not None and decision.HasField("tag") else None,
        )

    async def _forwarded(self, incoming: Incoming, earlier: EarlierPart) -> UpstreamAttempt:
        try:
            return await self.forward(incoming, earlier, self._left)
        except ApiError as error:
            log_event(
                log, logging.INFO, "no engine continues the stream", request_id=self.incoming.request.request_id,
                why=str(error),
            )  # fmt: skip
            raise NotContinuableError(NO_INSTANCE) from None

    def _count_move(self, how: str, left_id: str, since_s: float, num_tokens: int, why: str) -> None:
        self.context.metrics.migrations.labels(how).inc()
        self.context.metrics.migration_pause.observe(time.monotonic() - since_s)
        log_event(
            log, logging.INFO if how == PLANNED else logging.WARNING, "stream continued", how=how,
            request_id=self.incoming.request.request_id, left_instance_id=left_id,
            instance_id=self.attempt.destination.instance_id, why=why, tokens=num_tokens,
        )  # fmt: skip

    # The instance drains.

    def _follow_drain(self) -> None:
        """Have the stream leave its instance where that drains."""
        self._leaves = False
        if self.attempt.movable is not None:
            self.attempt.movable.set_leave(self._leave)

    def _leave(self) -> None:
        self._leaves = True
        self.attempt.interrupt()

    async def _moved(self) -> bool:
        """Continue the stream on another engine; where none takes it, it goes on here. Nothing is lost meanwhile."""
        self._leaves = False
        attempt, transcript, start_s = self.attempt, self._transcript, time.monotonic()
        instance_id = attempt.destination.instance_id
        try:
            if transcript is None:
                raise NotContinuableError(self.incoming.openai.why_not_continuable or OFF)
            if instance_id not in self._left:
                self._left.append(instance_id)
            num_tokens = transcript.num_tokens
            rest = self._rest_of(transcript)
            self._num_migrations += 1
            try:
                following = await self._forwarded(self._incoming_for(rest), attempt.part_so_far(num_tokens))
            except NotContinuableError:
                self._num_migrations -= 1
                self.context.migrations.give_back()
                raise
        except NotContinuableError as why:
            if attempt.movable is not None:
                self.context.requests.cannot_move(attempt.movable, str(why))
            return False
        attempt.migration = PLANNED
        attempt.finish(CANCELLED, counts=False)
        attempt.continue_attainment(num_tokens)
        transcript.continue_as(rest)
        self.attempt = following
        following.take_attainment(self.attainment)
        self._follow_drain()
        self._count_move(PLANNED, instance_id, start_s, num_tokens, "the instance drains")
        await self.call.write(b": x-block-migrations: %d\n\n" % self._num_migrations)
        return True
