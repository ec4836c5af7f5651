"""Forwarding a request: to one engine after the other until one responds, and the response back to the client."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.explanations import in_short
from services.gateway.attainment import StreamAttainment
from services.gateway.context import GatewayContext
from services.gateway.destinations import LAST_RESORT, Destination
from services.gateway.incoming import Incoming
from services.gateway.placing import Placing
from services.http.application import Call
from services.http.client import ConnectError, Connection, Headers, request_head
from services.http.errors import ApiError
from services.http.proxying import engine_error, is_event_stream
from services.http.sse import Ending, StreamReader, ending_of
from services.logs import log_event

log = logging.getLogger(__name__)

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
FAILED = common_pb2.FINISH_REASON_FAILED
NOTHING = Ending(finish_reason=FAILED, output_tokens=0, prompt_tokens=None)
MIN_WAIT_S = 0.001
RETRIED = (429, 500, 502, 503, 504)  # statuses of an engine that another engine may not return
NOT_SERVING = (502, 503, 504)  # of them, those of an engine that is down

# Headers of an engine's reply that the gateway sets itself.
OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
     b"upgrade", b"trailer", b"te", b"proxy-connection")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForwarder:
    """Forwards one request. `run` ends with a complete reply, or raises the ApiError that the client receives."""

    context: GatewayContext
    incoming: Incoming
    call: Call
    placing: Placing
    attainment: StreamAttainment | None = None  # of a request with targets

    async def run(self) -> None:
        """Forward the request, and pass the response on."""
        self.context.budget.earn()
        try:
            attempt = await self._response()
        except ApiError as error:
            if self.attainment is not None:
                self.attainment.refused(error.status)
            raise
        try:
            await (self._stream(attempt) if attempt.is_stream else self._pass_on(attempt))
        finally:
            attempt.finish(CANCELLED)  # unless it is finished already

    async def _response(self) -> UpstreamAttempt:
        """Place and send until an engine responds; no engine is tried twice."""
        last: UpstreamAttempt | None = None
        for number in range(1, self.context.settings.attempts + 1):
            try:
                destination = await self.placing.place()
            except ApiError:
                if last is not None:  # an engine's own error is more precise than the gateway's
                    return last
                raise
            attempt = UpstreamAttempt(
                context=self.context, incoming=self.incoming, destination=destination, attainment=self.attainment
            )
            try:
                await attempt.send()
            except (ConnectionError, TimeoutError) as error:
                self.context.failed_lately.failed(destination.instance_id)
                self._give_up(attempt, str(error))
                if not self._may_retry(number, type(error).__name__):
                    raise engine_error(error) from None
                continue
            except BaseException:
                attempt.finish(CANCELLED)
                raise
            if attempt.status not in RETRIED:
                self.context.failed_lately.succeeded(destination.instance_id)
                return attempt
            if attempt.status in NOT_SERVING:
                self.context.failed_lately.failed(destination.instance_id)
            self._give_up(attempt, f"status {attempt.status}")
            last = attempt
            if not self._may_retry(number, str(attempt.status)):
                return attempt
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, attempt: UpstreamAttempt, why: str) -> None:
        log_event(
            log, logging.INFO, "engine failed", request_id=self.incoming.request.request_id,
            instance_id=attempt.destination.instance_id, why=why,
        )  # fmt: skip
        attempt.finish(FAILED)

    def _may_retry(self, number: int, why: str) -> bool:
        if number >= self.context.settings.attempts or not self.context.budget.spend():
            return False
        self.context.metrics.retries.labels(why).inc()
        return True

    async def _pass_on(self, attempt: UpstreamAttempt) -> None:
        """Pass on a response in one piece."""
        attempt.finish()
        if self.attainment is not None:
            self.attainment.refused(attempt.status)
        await self.call.reply(attempt.status, self._headers(attempt), attempt.body)

    async def _stream(self, attempt: UpstreamAttempt) -> None:
        """Pass on a stream as it arrives."""
        await self.call.start(attempt.status, self._headers(attempt))
        events: bytes | None = attempt.body
        try:
            while events is not None:
                if events:
                    await self.call.write(events)
                events = await attempt.events()
        except (ConnectionError, TimeoutError) as error:
            self.context.failed_lately.failed(attempt.destination.instance_id)
            self.context.metrics.broken.inc()
            log_event(
                log, logging.WARNING, "stream broken", request_id=self.incoming.request.request_id,
                instance_id=attempt.destination.instance_id, why=str(error),
            )  # fmt: skip
            attempt.finish(FAILED)
            attempt.count_attainment(broken=True)
            raise engine_error(error) from None
        rest = attempt.rest()
        attempt.finish()
        attempt.count_attainment()
        await self.call.end(rest)

    def _headers(self, attempt: UpstreamAttempt) -> Headers:
        """Return the engine's headers, and add the decision and its forecast."""
        destination = attempt.destination
        headers = [pair for pair in attempt.headers if pair[0] not in OWN_HEADERS]
        headers += (
            (b"x-block-instance", destination.instance_id.encode("ascii", "replace")),
            (b"x-block-policy", destination.policy.encode("ascii", "replace")),
            (b"x-block-decision-ms", b"%.2f" % (self.placing.took_s * 1000)),
        )
        if destination.decision is not None and destination.decision.HasField("forecast"):
            forecast = destination.decision.forecast
            headers += (
                (b"x-block-predicted-ttft-ms", b"%.1f" % (forecast.ttft_s * 1000)),
                (b"x-block-predicted-e2e-ms", b"%.1f" % (forecast.e2e_s * 1000)),
            )
        if self.incoming.explain and destination.decision is not None:
            headers.append((b"x-block-explanation", in_short(destination.decision).encode()))
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "request placed", request_id=self.incoming.request.request_id,
                instance_id=destination.instance_id, policy=destination.policy,
                decision_ms=self.placing.took_s * 1000, status=attempt.status,
            )  # fmt: skip
        return headers


@dataclass(slots=True, kw_only=True)
class UpstreamAttempt:
    """After `send` the response is there: the whole of it, or the first events of a stream."""

    context: GatewayContext
    incoming: Incoming
    destination: Destination
    attainment: StreamAttainment | None = None

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""  # the whole, or the first events
    is_stream: bool = False

    _reader: StreamReader = field(default_factory=StreamReader)
    _connection: Connection | None = None
    _is_sent: bool = False
    _first_s: float | None = None
    _is_finished: bool = False
    _ended: Ending = NOTHING

    async def send(self) -> None:
        """Send the request, and wait; ConnectionError or TimeoutError where no valid response arrives."""
        incoming, settings, now_s = self.incoming, self.context.settings, self.context.loop.time
        timeout_s = settings.first_byte_s if incoming.openai.stream else settings.answer_s
        until_s = now_s() + timeout_s
        origin = self.destination.origin
        head = request_head(b"POST", origin, incoming.target, incoming.headers, len(incoming.body))
        self._is_sent = True
        try:
            connection = await self.context.engines.send(origin, head, incoming.body, timeout_s)
        except ConnectError:
            self._is_sent = False
            raise
        self._connection = connection
        self.status, self.headers = connection.status, connection.headers
        self.is_stream = self.status == 200 and is_event_stream(self.headers)
        if not self.is_stream:
            self.body = await connection.read_all(max(MIN_WAIT_S, until_s - now_s()), settings.max_answer_bytes)
        while self.is_stream and not self.body and not connection.drained():
            self.body = self._reader.feed(await connection.read(max(MIN_WAIT_S, until_s - now_s())))
        if self.is_stream:
            self._first_s = connection.last_byte_s
            if self.attainment is not None:
                self.attainment.received(self._reader.num_data, connection.last_byte_s)

    async def events(self) -> bytes | None:
        """Wait for more of a stream and return whole events, possibly none; None at its end."""
        connection = self._connection
        assert connection is not None
        if connection.drained():
            return None
        events = self._reader.feed(await connection.read(self.context.settings.idle_s))
        if self.attainment is not None:
            self.attainment.received(self._reader.num_data, connection.last_byte_s)
        return events

    def count_attainment(self, *, broken: bool = False) -> None:
        """Count what the stream, which has ended, attained."""
        if self.attainment is not None:
            self.attainment.ended(self._reader, self._ended, broken=broken)

    def rest(self) -> bytes:
        """Return the incomplete event at the end of a stream."""
        return self._reader.rest()

    def finish(self, reason: common_pb2.FinishReason.ValueType | None = None) -> None:
        """Keep or close the connection, release the reservation, report the outcome; only the first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._connection is not None:
            self._connection.release()
        self._ended = ending = self._ending()
        outcome = self._outcome(ending, ending.finish_reason if reason is None else reason) if self._is_sent else None
        if self.destination.policy != LAST_RESORT:
            request_id, instance_id = self.incoming.request.request_id, self.destination.instance_id
            self.context.releases.put(
                common_pb2.ReleaseRequest(request_id=request_id, instance_id=instance_id, outcome=outcome)
            )

    def _ending(self) -> Ending:
        if self.is_stream:
            return self._reader.ending()
        if self.status == 200:
            return ending_of(self.body)
        return NOTHING

    def _outcome(self, ending: Ending, reason: common_pb2.FinishReason.ValueType) -> common_pb2.Outcome:
        """Write the outcome, and count it."""
        request, decision, arrived_s = self.incoming.request, self.destination.decision, self.incoming.arrived_s
        whole_s = None
        if self._connection is not None and reason not in (CANCELLED, FAILED):
            whole_s = self._connection.last_byte_s - arrived_s
        e2e_s = time.monotonic() - arrived_s if whole_s is None else whole_s
        ttft_s = None if self._first_s is None else self._first_s - arrived_s
        tokens = ending.output_tokens
        tpot_s = None if ttft_s is None or tokens < 2 else (e2e_s - ttft_s) / (tokens - 1)
        self._count(tokens, ttft_s, whole_s)
        if ending.prompt_tokens:
            self.context.sizes.learn(self.incoming.openai, ending.prompt_tokens)
        return common_pb2.Outcome(
            request_id=request.request_id,
            instance_id=self.destination.instance_id,
            model=request.model,
            session_id=request.session_id,
            client_id=request.client_id,
            prompt_tokens=ending.prompt_tokens or request.prompt_tokens,
            output_tokens=tokens,
            finish_reason=reason,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            tpot_s=tpot_s,
            tag=decision.tag if decision is not None and decision.HasField("tag") else None,
            forecast=decision.forecast if decision is not None and decision.HasField("forecast") else None,
            policy=self.destination.policy,
            finished_unix_s=request.arrival_unix_s + e2e_s,
        )

    def _count(self, tokens: int, ttft_s: float | None, e2e_s: float | None) -> None:
        metrics = self.context.metrics
        metrics.output_tokens.inc(tokens)
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        if e2e_s is not None:
            metrics.e2e.observe(e2e_s)
