"""One request, from its arrival to its outcome: placed, sent, answered, released."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from protos.block.v1 import common_pb2, scheduler_pb2
from services.answering import Ending, StreamReader, ending_of
from services.gateway.asking import Ask, Wishes
from services.gateway.metrics import Metrics
from services.gateway.models import Models
from services.gateway.places import (
    LAST_RESORT,
    NEXT_BEST,
    FailedLately,
    LastResort,
    Place,
    place_next_best,
    place_of,
)
from services.gateway.prompt_sizes import PromptSizes
from services.gateway.refusals import RefusedError
from services.gateway.releases import Releases
from services.gateway.retries import RetryBudget
from services.gateway.schedulers import NobodyError, Schedulers
from services.gateway.settings import GatewaySettings
from services.http_client import ConnectError, Connection, Headers, HttpClient, request_head
from services.log_lines import say

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

EVENT_STREAM = b"text/event-stream"
WORTH_ANOTHER = (429, 500, 502, 503, 504)  # an engine's statuses that another engine may not give
NOT_SERVING = (502, 503, 504)  # of them, those that say that it is down
NO_PLACE = (429, 503)  # a scheduler's statuses that say nothing against the request

# Of an engine's reply these are ours to say.
OURS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"x-request-id",
     b"upgrade", b"trailer", b"te", b"proxy-connection")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all requests of a gateway share."""

    settings: GatewaySettings
    metrics: Metrics
    schedulers: Schedulers
    engines: HttpClient
    releases: Releases
    budget: RetryBudget
    sizes: PromptSizes
    last_resort: LastResort
    failed_lately: FailedLately
    models: Models
    loop: asyncio.AbstractEventLoop


@dataclass(slots=True, kw_only=True)
class Reply:
    """An engine's answer as far as it is here: all of it, or the first events of a stream."""

    place: Place
    connection: Connection
    status: int
    headers: Headers
    body: bytes
    stream: StreamReader | None = None


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request under way. `run` ends in an answer sent, or in an exception where nothing has been sent yet."""

    shared: Shared
    ask: Ask
    wishes: Wishes
    shown_id: str  # the request's name for the client
    request_id: str  # and for schedulers and engines: never twice at a time
    client_id: str
    prompt_tokens: int
    target: bytes  # path and query
    headers: Headers  # to pass on
    body: bytes
    send: Send
    arrived_s: float  # monotonic
    arrived_unix_s: float

    started: bool = False  # the client has got a status
    streaming: bool = False
    status: int = 200
    decision_s: float = 0.0
    _place: Place | None = None  # where something is reserved or under way
    _sent: bool = False  # to the engine
    _connection: Connection | None = None
    _reader: StreamReader | None = None
    _first_s: float | None = None
    _ended_s: float | None = None
    _excluded: list[str] = field(default_factory=list)
    _next_best: list[common_pb2.Instance] = field(default_factory=list)

    async def run(self) -> None:
        """See it through."""
        self.shared.budget.earn()
        try:
            reply = await self._answered()
            if reply.stream is None:
                await self._pass_on(reply)
            else:
                await self._stream(reply, reply.stream)
        finally:
            if self._place is not None:  # cancelled, or failed in a way that nobody foresaw
                ended = None if self._reader is None else self._reader.ending()
                self._leave(self._place, common_pb2.FINISH_REASON_CANCELLED, ended)

    async def cut(self, refused: RefusedError) -> None:
        """End an answer that has begun with an error that the client can read."""
        await self.send({"type": "http.response.body", "body": refused.event(), "more_body": False})

    # Placing.

    async def _placed(self) -> Place:
        """Find an instance: by a scheduler's decision; else the next best of an earlier one; else the last resort."""
        shared = self.shared
        avoided = shared.failed_lately.avoided()
        refused: RefusedError | None = None
        if len(shared.schedulers):
            try:
                return await self._decided_avoiding(avoided)
            except RefusedError as error:
                if error.status not in NO_PLACE and not self._excluded:
                    raise
                refused = error
            except NobodyError:
                pass
        for instance in self._next_best:
            if instance.instance_id not in self._excluded and instance.engine_url:
                shared.metrics.last_resort.labels(NEXT_BEST).inc()
                return place_next_best(instance)
        place = shared.last_resort.next(self._excluded, avoided)
        if place is not None:
            shared.metrics.last_resort.labels("engine_url").inc()
            return place
        raise refused or RefusedError(503, "nobody can say where this request could go: no scheduler answers")

    async def _decided_avoiding(self, avoided: list[str]) -> Place:
        """Ask without those that failed lately; where nothing is left then, with them."""
        more = [instance_id for instance_id in avoided if instance_id not in self._excluded]
        if more:
            try:
                return await self._decided([*self._excluded, *more])
            except RefusedError as error:
                if error.status == 429:
                    raise
        return await self._decided(self._excluded)

    async def _decided(self, excluded: list[str]) -> Place:
        response = await self.shared.schedulers.schedule(self._request(excluded), abandoned=self._give_back)
        decision = response.decision
        try:
            place = place_of(decision)
        except ValueError as error:
            self._give_back(response)
            say(log, logging.ERROR, "decision names no place", scheduler=decision.scheduler_id, why=str(error))
            raise NobodyError("the decision names no place") from None
        self._next_best = list(decision.next_best)
        self.shared.models.saw(decision.instance)
        return place

    def _request(self, excluded: list[str]) -> scheduler_pb2.ScheduleRequest:
        ask, wishes = self.ask, self.wishes
        return scheduler_pb2.ScheduleRequest(
            request=common_pb2.Request(
                request_id=self.request_id,
                model=ask.model,
                prompt_tokens=self.prompt_tokens,
                max_tokens=ask.max_tokens,
                min_tokens=ask.min_tokens,
                ignore_eos=ask.ignore_eos,
                expected_output_tokens=ask.expected_tokens,
                priority=ask.priority if wishes.priority is None else wishes.priority,
                request_class=wishes.request_class,
                slo=wishes.slo,
                session_id=wishes.session_id,
                client_id=self.client_id,
                waited_s=max(0.0, time.monotonic() - self.arrived_s),
                arrival_unix_s=self.arrived_unix_s,
            ),
            prompt=ask.prompt,
            exclude_instance_ids=excluded,
        )

    def _give_back(self, response: scheduler_pb2.ScheduleResponse) -> None:
        """Release what was decided in vain."""
        instance_id = response.decision.instance.instance_id
        self.shared.releases.put(common_pb2.ReleaseRequest(request_id=self.request_id, instance_id=instance_id))

    # Sending.

    async def _answered(self) -> Reply:
        """Place and send until an engine answers; every failure leaves one engine less to try."""
        shared = self.shared
        last: Reply | None = None
        for attempt in range(1, shared.settings.attempts + 1):
            asked_s = time.monotonic()
            try:
                place = self._place = await self._placed()
            except RefusedError:
                if last is not None:  # what an engine said is worth more than what we could say
                    return last
                raise
            took_s = time.monotonic() - asked_s
            self.decision_s += took_s
            shared.metrics.decision.observe(took_s)
            try:
                reply = await self._asked(place)
            except (ConnectionError, TimeoutError) as error:
                shared.failed_lately.failed(place.instance_id)
                self._give_up(place, str(error))
                if not self._may_retry(attempt, type(error).__name__):
                    raise unanswered(error) from None
                continue
            if reply.status not in WORTH_ANOTHER:
                shared.failed_lately.succeeded(place.instance_id)
                return reply
            if reply.status in NOT_SERVING:
                shared.failed_lately.failed(place.instance_id)
            self._give_up(place, f"status {reply.status}")
            last = reply
            if not self._may_retry(attempt, str(reply.status)):
                return reply
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, place: Place, why: str) -> None:
        """Leave a place that did not answer."""
        say(log, logging.INFO, "engine failed", request_id=self.request_id, instance_id=place.instance_id, why=why)
        self._excluded.append(place.instance_id)
        self._leave(place, common_pb2.FINISH_REASON_FAILED)

    def _may_retry(self, attempt: int, why: str) -> bool:
        if attempt >= self.shared.settings.attempts or not self.shared.budget.spend():
            return False
        self.shared.metrics.retries.labels(why).inc()
        return True

    async def _asked(self, place: Place) -> Reply:
        """Send the request to one engine, and wait until something can be told to the client."""
        settings, now_s = self.shared.settings, self.shared.loop.time
        within_s = settings.first_byte_s if self.ask.stream else settings.answer_s
        until_s = now_s() + within_s
        head = request_head(b"POST", place.origin, self.target, self.headers, len(self.body))
        try:
            connection = await self.shared.engines.send(place.origin, head, self.body, within_s)
        except ConnectError:
            raise
        except BaseException:
            self._sent = True
            raise
        self._sent = True
        self._connection = connection
        status, headers = connection.status, connection.headers
        if status != 200 or not is_event_stream(headers):
            left_s = max(0.001, until_s - now_s())
            body = await connection.read_all(left_s, settings.max_answer_bytes)
            self._ended_s = connection.last_byte_s
            return Reply(place=place, connection=connection, status=status, headers=headers, body=body)
        stream = self._reader = StreamReader()
        body = b""
        while not body and not connection.drained():
            body = stream.feed(await connection.read(max(0.001, until_s - now_s())))
        self._first_s = connection.last_byte_s
        return Reply(place=place, connection=connection, status=status, headers=headers, body=body, stream=stream)

    # Answering.

    async def _pass_on(self, reply: Reply) -> None:
        """Send an answer that is in one piece, and tell what became of the request."""
        headers = self._reply_headers(reply)
        headers.append((b"content-length", b"%d" % len(reply.body)))
        if self._place is not None:  # else it was given up before, and this is the best there is
            ended = ending_of(reply.body) if reply.status == 200 else None
            self._leave(self._place, common_pb2.FINISH_REASON_FAILED if ended is None else ended.finish_reason, ended)
        self.started, self.status = True, reply.status
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": reply.body, "more_body": False})

    async def _stream(self, reply: Reply, stream: StreamReader) -> None:
        """Pass a stream on as it comes; where it breaks off, end it with an error event."""
        connection = reply.connection
        idle_s = self.shared.settings.idle_s
        self.started = self.streaming = True
        headers = self._reply_headers(reply)
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        events = reply.body
        try:
            while not connection.drained():
                if events:
                    await self.send({"type": "http.response.body", "body": events, "more_body": True})
                events = stream.feed(await connection.read(idle_s))
        except (ConnectionError, TimeoutError) as error:
            self._ended_s = time.monotonic()
            self.shared.failed_lately.failed(reply.place.instance_id)
            self.shared.metrics.broken.inc()
            say(
                log, logging.WARNING, "stream broken", request_id=self.request_id,
                instance_id=reply.place.instance_id, why=str(error),
            )  # fmt: skip
            self._leave(reply.place, common_pb2.FINISH_REASON_FAILED, stream.ending())
            self.streaming = False
            await self.cut(unanswered(error))
            return
        self._ended_s = connection.last_byte_s
        events += stream.rest()
        ended = stream.ending()
        self._leave(reply.place, ended.finish_reason, ended)
        self.streaming = False
        await self.send({"type": "http.response.body", "body": events, "more_body": False})

    def _reply_headers(self, reply: Reply) -> Headers:
        """Pass the engine's headers on, and say where the answer comes from and why."""
        headers = [pair for pair in reply.headers if pair[0] not in OURS]
        place = reply.place
        headers += (
            (b"x-request-id", self.shown_id.encode()),
            (b"x-block-instance", place.instance_id.encode("ascii", "replace")),
            (b"x-block-policy", place.policy.encode("ascii", "replace")),
            (b"x-block-decision-ms", b"%.2f" % (self.decision_s * 1000)),
        )
        if place.decision is not None and place.decision.HasField("forecast"):
            forecast = place.decision.forecast
            headers += (
                (b"x-block-predicted-ttft-ms", b"%.1f" % (forecast.ttft_s * 1000)),
                (b"x-block-predicted-e2e-ms", b"%.1f" % (forecast.e2e_s * 1000)),
            )
        if log.isEnabledFor(logging.DEBUG):
            say(
                log, logging.DEBUG, "placed", request_id=self.request_id, instance_id=place.instance_id,
                policy=place.policy, decision_ms=self.decision_s * 1000, status=reply.status,
            )  # fmt: skip
        return headers

    # Leaving.

    def _leave(self, place: Place, reason: common_pb2.FinishReason.ValueType, ended: Ending | None = None) -> None:
        """Be done with an engine: close or keep the connection, and tell what became of the request there."""
        self._place = None
        if self._connection is not None:
            self._connection.release()
            self._connection = None
        outcome = self._outcome(place, reason, ended) if self._sent else None
        if place.policy != LAST_RESORT:
            self.shared.releases.put(
                common_pb2.ReleaseRequest(request_id=self.request_id, instance_id=place.instance_id, outcome=outcome)
            )
        self._sent, self._first_s, self._ended_s, self._reader = False, None, None, None

    def _outcome(
        self, place: Place, reason: common_pb2.FinishReason.ValueType, ended: Ending | None
    ) -> common_pb2.Outcome:
        """Write down what became of the request, and count it."""
        ended_s = time.monotonic() if self._ended_s is None else self._ended_s
        ttft_s = None if self._first_s is None else self._first_s - self.arrived_s
        e2e_s = ended_s - self.arrived_s
        tokens = 0 if ended is None else ended.output_tokens
        tpot_s = None if self._first_s is None or tokens < 2 else (ended_s - self._first_s) / (tokens - 1)
        metrics = self.shared.metrics
        metrics.output_tokens.inc(tokens)
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        if reason not in (common_pb2.FINISH_REASON_FAILED, common_pb2.FINISH_REASON_CANCELLED):
            metrics.e2e.observe(e2e_s)
        prompt_tokens = self.prompt_tokens
        if ended is not None and ended.prompt_tokens:
            prompt_tokens = ended.prompt_tokens
            self.shared.sizes.learn(self.ask, prompt_tokens)
        decision = place.decision
        return common_pb2.Outcome(
            request_id=self.request_id,
            instance_id=place.instance_id,
            model=self.ask.model,
            session_id=self.wishes.session_id,
            client_id=self.client_id,
            prompt_tokens=prompt_tokens,
            output_tokens=tokens,
            finish_reason=reason,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            tpot_s=tpot_s,
            tag=decision.tag if decision is not None and decision.HasField("tag") else None,
            forecast=decision.forecast if decision is not None and decision.HasField("forecast") else None,
            policy=place.policy,
            finished_unix_s=self.arrived_unix_s + e2e_s,
        )


def is_event_stream(headers: Headers) -> bool:
    """Tell whether an answer comes event by event."""
    return any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in headers)


def unanswered(error: Exception) -> RefusedError:
    """Put an engine's failure into words that name no address."""
    if isinstance(error, ConnectError):
        return RefusedError(503, "the engine cannot be reached")
    if isinstance(error, TimeoutError):
        return RefusedError(504, "the engine does not answer in time")
    return RefusedError(502, "the engine broke off")
