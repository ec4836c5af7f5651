"""How long answers will be: what the request says, what the tagger says, and what is said when nobody answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress

import grpc

from length_tagger import chained
from length_tagger.estimate import Query
from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services.logs import log_event
from services.placement.settings import SchedulerSettings
from services.rpc.messages import tag_from
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.replies import note_of
from services.scheduler_server.sidecar_connection import CHANNEL

log = logging.getLogger(__name__)

PROMPT_END_BYTES = 64 * 1024  # head and tail of a longer prompt are enough
BYTES_PER_TOKEN = 4  # of English text, about

OBSERVE_S = 5.0  # deadline
GATHER_S = 0.25  # outcomes are told together
MOST_AT_ONCE = 256
MOST_KEPT = 4096  # while the tagger is away


class LengthResolver:
    """Finds a tag for every request, and brings outcomes home to the tagger."""

    def __init__(self, settings: SchedulerSettings, measures: SchedulerMetrics) -> None:
        """Connect to the tagger, if there is one; it may come later."""
        self._deadline_s = settings.tagger_deadline_s
        self._measures = measures
        self._without = chained(["client", "constant"], settings.without_tagger)
        self._circuit = settings.circuit()
        self._outcomes: deque[common_pb2.Outcome] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(settings.tagger, options=CHANNEL) if settings.tagger else None
        self._stub = tagger_pb2_grpc.LengthTaggerStub(self._channel) if self._channel else None

    async def settle(self, request: common_pb2.Request, prompt: bytes, *, ask: bool) -> None:
        """Complete a request with what forecasts need: how long its prompt is, and how long its answer will be.

        Unless the tagger is to be asked, the answer's length is what can be told without it.
        """
        if not request.prompt_tokens:
            if not prompt:
                raise ValueError("request.prompt_tokens: is missing, and there is no prompt to estimate it from")
            request.prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
        if request.HasField("tag"):
            self._measures.tags.labels("request").inc()
        elif not request.HasField("output_tokens"):
            fixed = request.ignore_eos and request.HasField("max_tokens")  # no tagger would say more
            tag = await self._asked(request, prompt) if ask and not fixed and self._stub is not None else None
            request.tag.CopyFrom(tag or self._own(request))

    async def _asked(self, request: common_pb2.Request, prompt: bytes) -> common_pb2.Tag | None:
        if self._stub is None or not self._circuit.allows(time.monotonic()):
            return None
        if len(prompt) > 2 * PROMPT_END_BYTES:
            prompt = prompt[:PROMPT_END_BYTES] + prompt[-PROMPT_END_BYTES:]
        try:
            answer = await self._stub.Tag(
                tagger_pb2.TagRequest(request=request, prompt=prompt), timeout=self._deadline_s
            )
            if answer.HasField("tag"):
                tag_from(answer.tag)
        except (grpc.aio.AioRpcError, ValueError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ValueError(error.details()) from None
            self._fail(error)
            return None
        self._circuit.succeeded()
        if not answer.HasField("tag"):
            return None
        self._measures.tags.labels("tagger").inc()
        return answer.tag

    def _own(self, request: common_pb2.Request) -> common_pb2.Tag:
        """Say what can be said without a tagger, by the tagger's own simplest rules."""
        try:
            query = Query(
                max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
                min_tokens=request.min_tokens if request.HasField("min_tokens") else None,
                ignore_eos=request.ignore_eos,
                expected_tokens=request.expected_output_tokens if request.HasField("expected_output_tokens") else None,
            )
        except ValueError as error:
            raise ValueError(f"request.{str(error).replace('expected_tokens', 'expected_output_tokens', 1)}") from None
        estimate = self._without.estimate(query)
        if estimate is None:
            raise AssertionError("the constant always knows")
        self._measures.tags.labels(f"without_tagger_{estimate.estimator}").inc()
        return common_pb2.Tag(
            median_tokens=estimate.median_tokens,
            spread=estimate.spread,
            confidence=estimate.confidence,
            estimator=estimate.estimator,
        )

    def _fail(self, error: Exception) -> None:
        """Count a failure; one too many leaves the tagger alone for a while."""
        late = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        self._measures.tagger_failures.labels("late" if late else "failed").inc()
        if self._circuit.failed(time.monotonic()):
            log_event(log, logging.WARNING, "tagger left alone", reason=note_of(error))

    # Outcomes.

    def observe(self, outcome: common_pb2.Outcome) -> None:
        """Tell the tagger what became of a request, soon, together with others; lost if it stays away for long."""
        if self._stub is None:
            return
        self._outcomes.append(outcome)
        if len(self._outcomes) > MOST_KEPT:
            self._outcomes.popleft()
            self._measures.outcomes.labels("lost").inc()
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        while self._outcomes and not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), GATHER_S)
            await self._tell_some()

    async def _tell_some(self) -> bool:
        some = [self._outcomes.popleft() for _ in range(min(MOST_AT_ONCE, len(self._outcomes)))]
        if not some or self._stub is None:
            return False
        try:
            await self._stub.Observe(tagger_pb2.ObserveRequest(outcomes=some), timeout=OBSERVE_S)
        except grpc.aio.AioRpcError as error:
            refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # once more would not help
            if not refused:
                self._outcomes.extendleft(reversed(some))
            self._measures.outcomes.labels("refused" if refused else "again").inc(len(some))
            log_event(log, logging.DEBUG, "outcomes not told", num=len(some), reason=note_of(error))
            return refused
        self._measures.outcomes.labels("told").inc(len(some))
        return True

    async def close(self) -> None:
        """Tell what is left, if it is taken, and let the channel go."""
        self._closing.set()
        if self._telling is not None:
            await self._telling
        while await self._tell_some():
            pass
        if self._channel is not None:
            await self._channel.close()
