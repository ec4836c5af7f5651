"""One engine's attempt at a request: sent, read as it arrives, and its outcome reported at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2
from services.gateway.attainment import StreamAttainment
from services.gateway.context import GatewayContext
from services.gateway.destinations import LAST_RESORT, Destination
from services.gateway.incoming import Incoming
from services.gateway.metrics import ModelMetrics
from services.http.connection import ConnectError, Connection
from services.http.continued_request import EarlierPart
from services.http.data_parallel import with_rank
from services.http.endpoints import UNPLACED
from services.http.headers import Headers, request_head
from services.http.kv_transfer import decode_body, with_cached_tokens
from services.http.prefill_leg import HeldBlocks, PrefillReply
from services.http.proxying import OK, RETRIED, SERVER_ERROR, is_event_stream
from services.http.reply_format import CANCELLED, FAILED
from services.http.sse import Ending, StreamReader, ending_of, num_without_token
from services.instances.draining_requests import REMOVED, MovableRequest
from services.placement.outcomes import outcome_of
from services.tracing.request_spans import DECODE, SERVE, STATUS

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan

NOTHING = Ending(finish_reason=FAILED, output_tokens=0, prompt_tokens=None)
REFUSED = Ending(finish_reason=common_pb2.FINISH_REASON_UNSPECIFIED, output_tokens=0, prompt_tokens=None)
MIN_WAIT_S = 0.001
COMPLETE = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
INCOMPLETE_NAMES = {FAILED: "failed", CANCELLED: "cancelled"}


class LeftError(Exception):
    """The request leaves its instance, which drains, for another one that has been found."""


class RemovedError(ConnectionError):
    """The instance of the request is removed."""


@dataclass(slots=True, kw_only=True)
class UpstreamAttempt:
    """After `send` the response is there: the whole of it, or the first events of a stream."""

    context: GatewayContext
    incoming: Incoming
    destination: Destination
    attainment: StreamAttainment | None = None
    earlier: EarlierPart | None = None  # of an answer that this attempt continues
    held: HeldBlocks | None = None  # that a prefill leg left for this attempt, which is then a decode leg

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""  # the whole, or the first events
    is_stream: bool = False
    hand_over_s: float | None = None
    migration: str = ""  # why another engine continues the answer, or none does
    movable: MovableRequest | None = None  # at the instance, from sending to the end
    sent_s: float | None = None
    is_forced: bool = False  # its instance is removed, and the request could not leave in time

    _waiting: asyncio.Timeout | None = None  # for the response
    _find_other: Callable[[], Awaitable[bool]] | None = None
    _leaving: asyncio.Task[None] | None = None
    _reader: StreamReader = field(init=False)
    _connection: Connection | None = None
    _is_sent: bool = False
    _first_s: float | None = None
    _last_s: float = 0.0  # when the last piece with a token came
    _num_data: int = 0  # lines of data up to then
    _is_finished: bool = False
    _ended: Ending = NOTHING
    _reported: common_pb2.Outcome | None = None
    _span: ActiveSpan | None = None

    def __post_init__(self) -> None:
        """Read the response as its endpoint writes it."""
        self._reader = StreamReader(self.incoming.endpoint.format)

    @property
    def metrics(self) -> ModelMetrics:
        """The metrics of the answers of the request's model."""
        return self.context.metrics.of_model(self.incoming.request.model)

    async def send(self, leave: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Send the request, and wait; ConnectionError or TimeoutError where no valid response arrives.

        Where the instance drains, `leave` finds another one: then LeftError ends the wait. RemovedError where the
        request cannot stay any longer.
        """
        async with asyncio.timeout(None) as waiting:
            self._waiting, self._find_other = waiting, leave
            try:
                await self._send()
            except asyncio.CancelledError:
                if waiting.expired():
                    raise RemovedError(REMOVED) if self.is_forced else LeftError from None
                raise
            finally:
                self._waiting = None
                if self._leaving is not None:
                    self._leaving.cancel()

    async def _send(self) -> None:
        incoming, settings, now_s = self.incoming, self.context.settings, self.context.loop.time
        timeout_s = settings.first_byte_s if incoming.openai.stream else settings.answer_s
        until_s = now_s() + timeout_s
        origin, held = self.destination.origin, self.held
        body = incoming.body_for(self.destination.decision)
        if held is not None:
            body = decode_body(body, held.prompt)
        self._span = incoming.spans.leg(
            SERVE if held is None else DECODE,
            origin,
            instance_id=self.destination.instance_id,
            policy=self.destination.policy,
        )
        head = request_head(
            b"POST",
            origin,
            incoming.target,
            with_rank(incoming.spans.headers_below(self._span, incoming.headers), self.destination.rank),
            len(body),
        )
        self._is_sent, self.sent_s = True, time.monotonic()
        self.movable = self.context.requests.enter(self.destination.instance_id, self._leave, self._force)
        try:
            connection = await self.context.engines.send(origin, head, body, timeout_s)
        except ConnectError:
            self._is_sent = False
            raise
        self._connection = connection
        if held is not None:
            self.hand_over_s = connection.sent_s - held.replied_s
            self.context.metrics.hand_over.observe(self.hand_over_s)
        self.status, self.headers = connection.status, connection.headers
        self.is_stream = self.status == OK and is_event_stream(self.headers)
        if not self.is_stream:
            body = await connection.read_all(max(MIN_WAIT_S, until_s - now_s()), settings.max_answer_bytes)
            self.body = self._corrected(body)
        while self.is_stream and not self._has_begun() and not connection.drained():
            self.body += self._corrected(self._reader.feed(await connection.read(max(MIN_WAIT_S, until_s - now_s()))))
        if self.is_stream:
            self._first_s = self._last_s = connection.last_byte_s
            self._num_data = self._reader.num_data
            if self.attainment is not None:
                self.attainment.received(self._reader.num_data, connection.last_byte_s)

    # While the instance drains.

    def _leave(self) -> None:
        """Look for another instance while the response is awaited."""
        if self._waiting is not None and self._find_other is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self._end_wait_if(self._find_other))

    async def _end_wait_if(self, find_other: Callable[[], Awaitable[bool]]) -> None:
        try:
            if await find_other() and self._waiting is not None:
                self._waiting.reschedule(self.context.loop.time())
        finally:
            self._leaving = None

    def _force(self) -> None:
        """End the request: its instance is removed."""
        self.is_forced = True
        if self._waiting is not None:
            self._waiting.reschedule(self.context.loop.time())
        elif self._connection is not None:
            self._connection.abort()

    def interrupt(self) -> None:
        """End the wait for more of a stream with ReadInterruptedError, where there is one; nothing is lost."""
        if self._connection is not None:
            self._connection.interrupt()

    def _has_begun(self) -> bool:
        """Return whether enough of a stream has come; after a chat's first event a decode leg may still fail."""
        has_begun = self.incoming.endpoint.format.has_begun(self.body)
        return has_begun and (self.held is None or not self._reader.has_role_only())

    def has_failed_to_fetch(self) -> bool:
        """Return whether a decode leg ended in an error of the engine, of which nothing has been passed on."""
        if self.held is None:
            return False
        return self.status == SERVER_ERROR or (self.status == OK and self._ending().finish_reason == FAILED)

    def refuse(self, reply: PrefillReply) -> None:
        """Take the reply to the prefill leg, which is an error, as the reply to the request."""
        self.status, self.headers, self.body = reply.status, reply.headers, reply.body

    def _corrected(self, reply: bytes) -> bytes:
        """Set the prefix hits of a decode leg to those of its prefill leg."""
        if self.held is None or self.held.prompt.cached_tokens is None:
            return reply
        return with_cached_tokens(reply, self.held.prompt.cached_tokens)

    async def events(self) -> bytes | None:
        """Wait for more of a stream and return whole events, possibly none; None at its end."""
        connection = self._connection
        assert connection is not None
        if connection.drained():
            return None
        events = self._reader.feed(await connection.read(self.context.settings.idle_s))
        self._count_tokens(events, connection.last_byte_s)
        if self.attainment is not None:
            self.attainment.received(self._reader.num_data, connection.last_byte_s)
        return self._corrected(events)

    def _count_tokens(self, events: bytes, at_s: float) -> None:
        """Count the time since the piece before, for each token of this one."""
        num_data = self._reader.num_data
        without = 0 if self._reader.format.is_named else num_without_token(events)
        num_tokens = num_data - self._num_data - without
        self._num_data = num_data
        if num_tokens > 0:
            self.metrics.inter_token.observe((at_s - self._last_s) / num_tokens, num_tokens)
            self._last_s = at_s

    def count_attainment(self, *, broken: bool = False) -> None:
        """Count what the stream, which has ended, attained."""
        if self.attainment is not None:
            self.attainment.ended(self._reader, self._ended, broken=broken)

    def continue_attainment(self, num_tokens: int) -> None:
        """Keep what the stream attained up to now, after `num_tokens`: another attempt continues it."""
        if self.attainment is not None:
            self.attainment.continues(self._reader, self._ended, num_tokens)

    def take_attainment(self, attainment: StreamAttainment | None) -> None:
        """Measure from the first events on, which have come, what another attempt measured up to them."""
        self.attainment = attainment
        if attainment is not None:
            attainment.received(self._num_data, self._last_s)

    def part_so_far(self, num_tokens: int) -> EarlierPart:
        """Return what the client has received of the answer: this many tokens."""
        if self.earlier is not None:
            return self.earlier.after(num_tokens)
        arrived_s = self.incoming.arrived_s
        return EarlierPart(
            arrived_s=arrived_s,
            ttft_s=None if self._first_s is None else self._first_s - arrived_s,
            prompt_tokens=self.incoming.request.prompt_tokens,
            num_tokens=num_tokens,
        )

    def rest(self) -> bytes:
        """Return the incomplete event at the end of a stream; ConnectionError where the answer is cut."""
        rest = self._reader.rest()
        if self._reader.is_cut():
            raise ConnectionError("the stream ended before the answer")
        return self._corrected(rest)

    def finish(self, reason: common_pb2.FinishReason.ValueType | None = None, *, counts: bool = True) -> None:
        """Keep or close the connection, release the reservation, report the outcome; only the first call counts.

        Metrics of answers do not count an attempt that another one may continue.
        """
        release = self._end(reason, counts=counts)
        if release is not None:
            self.context.releases.put(release)

    async def finish_now(self, reason: common_pb2.FinishReason.ValueType, *, counts: bool = True) -> None:
        """Finish, and wait for the release: the next decision may reserve at the same instance."""
        release = self._end(reason, counts=counts)
        if release is not None:
            await self.context.releases.deliver(release)

    def count_end(self, reason: common_pb2.FinishReason.ValueType) -> None:
        """Count an attempt that was to be continued, and was not, with the reason why its answer ended."""
        if self._reported is not None:
            self._reported.finish_reason = reason
            self.metrics.ended(self._as_received(self._reported), self.incoming.spans.trace_id)
            self._reported = None

    def _end(
        self, reason: common_pb2.FinishReason.ValueType | None, *, counts: bool = True
    ) -> common_pb2.ReleaseRequest | None:
        if self._is_finished:
            return None
        self._is_finished = True
        if self.movable is not None:
            self.movable.end()
        if self._connection is not None:
            self._connection.release()
        self._ended = ending = self._ending()
        if reason in COMPLETE and ending.finish_reason != reason:  # the end was missing, or an error came after it
            self._ended = ending = replace(ending, finish_reason=reason)
        outcome = self._outcome(ending, ending.finish_reason if reason is None else reason) if self._is_sent else None
        if self.incoming.endpoint.kind == UNPLACED:  # nothing is reserved, and nothing generated
            if self._span is not None:
                self._end_span(self._span, outcome)
            return None
        if outcome is not None:
            if counts:
                self.metrics.ended(self._as_received(outcome), self.incoming.spans.trace_id)
            else:
                self._reported = common_pb2.Outcome()
                self._reported.CopyFrom(outcome)  # the release names the reason why this attempt ended
            whole = self._as_received(outcome)
            self.incoming.spans.ended(whole)
            self._count_use(whole)
        if self._span is not None:
            self._end_span(self._span, outcome)
        if self.destination.policy == LAST_RESORT:
            return None
        return common_pb2.ReleaseRequest(
            request_id=self.incoming.request.request_id, instance_id=self.destination.instance_id, outcome=outcome
        )

    def _count_use(self, whole: common_pb2.Outcome) -> None:
        """Count what the answer used of the limits of its key; one in the background may still be computed."""
        usage, is_complete = self.incoming.usage, whole.output_tokens > 0 and whole.finish_reason in COMPLETE
        usage.served(whole.prompt_tokens, whole.output_tokens)
        if self.incoming.openai.in_background and self.status == OK and not is_complete:
            usage.goes_on()

    def _as_received(self, outcome: common_pb2.Outcome) -> common_pb2.Outcome:
        """Return the outcome of the whole answer, of which this attempt is the last part."""
        return outcome if self.earlier is None else self.earlier.whole(outcome, self.incoming.arrived_s)

    def _end_span(self, span: ActiveSpan, outcome: common_pb2.Outcome | None) -> None:
        span.set({STATUS: self.status or None, "block.output_tokens": self._ended.output_tokens})
        if self.hand_over_s is not None:
            span.set({"block.hand_over_ms": self.hand_over_s * 1e3})
        if outcome is None:
            span.end("ConnectError")
        elif self.status >= SERVER_ERROR:
            span.end(str(self.status))
        else:
            span.end(INCOMPLETE_NAMES.get(outcome.finish_reason, ""))

    def _ending(self) -> Ending:
        if self.is_stream:
            return self._reader.ending()
        if self.status == OK:
            return ending_of(self.body, self.incoming.endpoint.format)
        return NOTHING if self.status in RETRIED or not self.status else REFUSED

    def _outcome(self, ending: Ending, reason: common_pb2.FinishReason.ValueType) -> common_pb2.Outcome:
        """Write the outcome."""
        incoming, held = self.incoming, self.held
        if ending.prompt_tokens:
            self.context.prompts.sizes.learn(incoming.openai, ending.prompt_tokens)
        return outcome_of(
            incoming.request,
            self.destination.decision,
            instance_id=self.destination.instance_id,
            policy=self.destination.policy,
            reason=reason,
            arrived_s=incoming.arrived_s,
            first_s=self._first_s,
            last_s=None if self._connection is None else self._connection.last_byte_s,
            output_tokens=ending.output_tokens,
            prompt_tokens=ending.prompt_tokens,
            prefill_instance_id="" if held is None else held.instance_id,
            prefill_s=None if held is None else held.prefill_s,
            hand_over_s=self.hand_over_s,
            migration=self.migration,
        )
