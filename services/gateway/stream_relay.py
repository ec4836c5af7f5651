"""Passing a stream on to its client, and continuing it on another engine where its own fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.gateway.attainment import StreamAttainment
from services.gateway.context import GatewayContext
from services.gateway.incoming import Incoming, continued
from services.gateway.upstream_attempt import UpstreamAttempt
from services.http.application import Call
from services.http.client import Headers
from services.http.continued_request import OFF, EarlierPart
from services.http.errors import ApiError
from services.http.proxying import engine_error
from services.http.sse import CANCELLED, FAILED
from services.http.stream_continuation import NotContinuableError, StreamTranscript, failure_in
from services.logs import log_event
from services.tracing.request_spans import MIGRATIONS

log = logging.getLogger(__name__)

CONTINUED, ENDED = "continued", "ended"

# Sends a request that continues a stream, by its earlier part and the instances that failed; ApiError where none can.
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
    attainment: StreamAttainment | None = None
    _transcript: StreamTranscript | None = None
    _num_migrations: int = 0
    _failed: list[str] = field(default_factory=list)  # instances

    def __post_init__(self) -> None:
        """Follow the answer, unless it can never continue."""
        openai, decision = self.incoming.openai, self.attempt.destination.decision
        mode = self.context.settings.continue_streams
        if mode == OFF or openai.why_not_continuable:
            return
        self._transcript = StreamTranscript(
            body=self.incoming.own_body,
            chat=self.incoming.is_chat,
            max_model_len=None if decision is None else decision.instance.settings.max_model_len or None,
            hides_ids=self.incoming.hides_token_ids,
        )

    async def run(self, headers: Headers) -> None:
        """Pass on the stream to its end; ApiError where it breaks."""
        await self.call.start(self.attempt.status, headers)
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
        """Pass on what one engine sends, to its end."""
        attempt = self.attempt
        events: bytes | None = attempt.body
        while events is not None:
            if events:
                await self._write(events)
            events = await attempt.events()
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

    async def _continues(self, error: Exception) -> bool:
        """Have another engine continue the stream; False where it has ended now; ApiError where it breaks."""
        context, attempt = self.context, self.attempt
        failed_s = time.monotonic()
        instance_id = attempt.destination.instance_id
        context.failed_lately.failed(instance_id)
        self._failed.append(instance_id)
        transcript = self._transcript
        try:
            if transcript is None:
                raise NotContinuableError(self.incoming.openai.why_not_continuable or OFF)
            end = transcript.end()
            if end is not None:
                attempt.finish()
                attempt.count_attainment()
                context.metrics.migrations.labels(ENDED).inc()
                await self.call.end(end)
                return False
            await self._continue(transcript)
        except NotContinuableError as why:
            context.metrics.migrations.labels(str(why)).inc()
            context.metrics.broken.inc()
            log_event(
                log, logging.WARNING, "stream broken", request_id=self.incoming.request.request_id,
                instance_id=instance_id, why=str(error), not_continued_because=str(why),
            )  # fmt: skip
            attempt.finish(FAILED)
            attempt.count_end(FAILED)
            attempt.count_attainment(broken=True)
            if isinstance(error, ReportedFailureError):
                await self.call.end(error.events)
                return False
            raise engine_error(error) from None
        context.metrics.migrations.labels(CONTINUED).inc()
        context.metrics.migration_pause.observe(time.monotonic() - failed_s)
        log_event(
            log, logging.WARNING, "stream continued", request_id=self.incoming.request.request_id,
            failed_instance_id=instance_id, instance_id=self.attempt.destination.instance_id, why=str(error),
            tokens=transcript.num_tokens,
        )  # fmt: skip
        await self.call.write(b": x-block-migrations: %d\n\n" % self._num_migrations)
        return True

    async def _continue(self, transcript: StreamTranscript) -> None:
        """Replace the attempt by one on another engine; NotContinuableError where there is none."""
        context, attempt = self.context, self.attempt
        if self._num_migrations >= context.settings.max_migrations:
            raise NotContinuableError("limit")
        rest = transcript.continuation()
        if not context.budget.spend():
            raise NotContinuableError("retry_budget")
        self._num_migrations += 1
        self.incoming.spans.set({MIGRATIONS: self._num_migrations})
        earlier = attempt.part_so_far(transcript.num_tokens)
        attempt.finish(FAILED, counts=False)
        if self.attainment is not None:
            attempt.continue_attainment(transcript.num_tokens)
        decision = attempt.destination.decision
        incoming = continued(
            self.incoming,
            rest,
            number=self._num_migrations,
            tag=decision.tag if decision is not None and decision.HasField("tag") else None,
        )
        transcript.continue_as(rest)
        try:
            self.attempt = await self.forward(incoming, earlier, self._failed)
        except ApiError as error:
            log_event(
                log, logging.INFO, "no engine continues the stream", request_id=self.incoming.request.request_id,
                why=str(error),
            )  # fmt: skip
            raise NotContinuableError("no_instance") from None
