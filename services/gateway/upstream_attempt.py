"""One request at one engine: sent there, answered, left; what became of it is told once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.gateway.context import GatewayContext
from services.gateway.destinations import LAST_RESORT, Destination
from services.gateway.incoming import Incoming
from services.http.client import ConnectError, Connection, Headers, request_head
from services.http.sse import Ending, StreamReader, ending_of

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
FAILED = common_pb2.FINISH_REASON_FAILED
EVENT_STREAM = b"text/event-stream"


@dataclass(slots=True, kw_only=True)
class UpstreamAttempt:
    """After `send` there is something to tell the client: a whole answer, or the first events of a stream."""

    shared: GatewayContext
    incoming: Incoming
    place: Destination

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""  # whole, or the first events
    is_stream: bool = False

    _reader: StreamReader = field(default_factory=StreamReader)
    _connection: Connection | None = None
    _sent: bool = False
    _first_s: float | None = None
    _left: bool = False

    async def send(self) -> None:
        """Send the request, and wait; ConnectionError or TimeoutError where nothing comes that makes sense."""
        incoming, settings, now_s = self.incoming, self.shared.settings, self.shared.loop.time
        within_s = settings.first_byte_s if incoming.ask.stream else settings.answer_s
        until_s = now_s() + within_s
        origin = self.place.origin
        head = request_head(b"POST", origin, incoming.target, incoming.headers, len(incoming.body))
        self._sent = True
        try:
            connection = await self.shared.engines.send(origin, head, incoming.body, within_s)
        except ConnectError:
            self._sent = False
            raise
        self._connection = connection
        self.status, self.headers = connection.status, connection.headers
        self.is_stream = self.status == 200 and is_event_stream(self.headers)
        if not self.is_stream:
            self.body = await connection.read_all(max(0.001, until_s - now_s()), settings.max_answer_bytes)
        while self.is_stream and not self.body and not connection.drained():
            self.body = self._reader.feed(await connection.read(max(0.001, until_s - now_s())))
        if self.is_stream:
            self._first_s = connection.last_byte_s

    async def events(self) -> bytes | None:
        """Wait for more of a stream: whole events, which may be none yet; None at its end."""
        connection = self._connection
        assert connection is not None
        if connection.drained():
            return None
        return self._reader.feed(await connection.read(self.shared.settings.idle_s))

    def rest(self) -> bytes:
        """Give what is left at the end of a stream that did not end with an event."""
        return self._reader.rest()

    def leave(self, reason: common_pb2.FinishReason.ValueType | None = None) -> None:
        """Be done: keep or close the connection, release, tell the outcome. Only the first time counts."""
        if self._left:
            return
        self._left = True
        if self._connection is not None:
            self._connection.release()
        ending = self._ending()
        outcome = self._outcome(ending, ending.finish_reason if reason is None else reason) if self._sent else None
        if self.place.policy != LAST_RESORT:
            request_id, instance_id = self.incoming.request.request_id, self.place.instance_id
            self.shared.releases.put(
                common_pb2.ReleaseRequest(request_id=request_id, instance_id=instance_id, outcome=outcome)
            )

    def _ending(self) -> Ending:
        if self.is_stream:
            return self._reader.ending()
        if self.status == 200:
            return ending_of(self.body)
        return Ending(finish_reason=FAILED, output_tokens=0, prompt_tokens=None)

    def _outcome(self, ending: Ending, reason: common_pb2.FinishReason.ValueType) -> common_pb2.Outcome:
        """Write down what became of the request, and count it."""
        request, decision, arrived_s = self.incoming.request, self.place.decision, self.incoming.arrived_s
        whole_s = None
        if self._connection is not None and reason not in (CANCELLED, FAILED):
            whole_s = self._connection.last_byte_s - arrived_s
        e2e_s = time.monotonic() - arrived_s if whole_s is None else whole_s
        ttft_s = None if self._first_s is None else self._first_s - arrived_s
        tokens = ending.output_tokens
        tpot_s = None if ttft_s is None or tokens < 2 else (e2e_s - ttft_s) / (tokens - 1)
        self._count(tokens, ttft_s, whole_s)
        if ending.prompt_tokens:
            self.shared.sizes.learn(self.incoming.ask, ending.prompt_tokens)
        return common_pb2.Outcome(
            request_id=request.request_id,
            instance_id=self.place.instance_id,
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
            policy=self.place.policy,
            finished_unix_s=request.arrival_unix_s + e2e_s,
        )

    def _count(self, tokens: int, ttft_s: float | None, e2e_s: float | None) -> None:
        metrics = self.shared.metrics
        metrics.output_tokens.inc(tokens)
        if ttft_s is not None:
            metrics.ttft.observe(ttft_s)
        if e2e_s is not None:
            metrics.e2e.observe(e2e_s)


def is_event_stream(headers: Headers) -> bool:
    """Tell whether an answer comes event by event."""
    return any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in headers)
