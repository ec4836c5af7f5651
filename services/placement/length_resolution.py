"""The length of a response: given by the request, by the tagger, or by default if the tagger does not reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress

import grpc

from length_tagger import chained
from length_tagger.estimate import Query
from protos.block.v1 import common_pb2, tagger_pb2
from scheduler.prefix.prompt import BYTES_PER_TOKEN, PROMPT_END_BYTES
from services.logs import log_event
from services.placement.listeners import COMPLETED, PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.placement.replies import note_of
from services.placement.settings import SchedulerSettings
from services.rpc.grpc_channel import GrpcChannel
from services.rpc.messages import tag_from
from services.security.own_key import own_key

log = logging.getLogger(__name__)

TAGGER = tagger_pb2.DESCRIPTOR.services_by_name["LengthTagger"].full_name
OBSERVE_S = 5.0  # deadline
GATHER_S = 0.25  # outcomes are sent in batches
MAX_BATCH = 256
MAX_KEPT = 4096  # while the tagger is away


class LengthResolver(PlacementListener):
    """Finds a tag for every request, and sends outcomes to the tagger, which learns from them."""

    def __init__(self, settings: SchedulerSettings, metrics: SchedulerMetrics) -> None:
        """Connect to the tagger, if one is set; it may start later."""
        self._deadline_s = settings.tagger_deadline_s
        self._metrics = metrics
        self._without = chained(["client", "constant"], settings.without_tagger)
        self._circuit = settings.circuit()
        self._outcomes: deque[common_pb2.Outcome] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._channel = GrpcChannel(settings.tagger, key=own_key(settings.part_key_file)) if settings.tagger else None

    async def resolve(self, request: common_pb2.Request, prompt: bytes, *, ask: bool) -> None:
        """Complete a request with the lengths that forecasts need: of its prompt and of its response.

        Without `ask` the length of the response is estimated without the tagger.
        """
        if not request.prompt_tokens:
            if not prompt:
                raise ValueError("request.prompt_tokens: is missing, and there is no prompt to estimate it from")
            request.prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
        if request.HasField("tag"):
            self._metrics.tags.labels("request").inc()
        elif not request.HasField("output_tokens"):
            fixed = request.ignore_eos and request.HasField("max_tokens")  # the length is known
            tag = await self._ask(request, prompt) if ask and not fixed and self._channel is not None else None
            request.tag.CopyFrom(tag or self._default(request))

    async def _ask(self, request: common_pb2.Request, prompt: bytes) -> common_pb2.Tag | None:
        if self._channel is None or not self._circuit.allows(time.monotonic()):
            return None
        if len(prompt) > 2 * PROMPT_END_BYTES:
            prompt = prompt[:PROMPT_END_BYTES] + prompt[-PROMPT_END_BYTES:]
        try:
            answer = await self._channel.call(
                f"/{TAGGER}/Tag",
                tagger_pb2.TagRequest(request=request, prompt=prompt),
                tagger_pb2.TagResponse,
                timeout_s=self._deadline_s,
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
        self._metrics.tags.labels("tagger").inc()
        return answer.tag

    def _default(self, request: common_pb2.Request) -> common_pb2.Tag:
        """Estimate a length without the tagger: the expected length of the client, or a constant."""
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
            raise AssertionError("the constant always gives an estimate")
        self._metrics.tags.labels(f"without_tagger_{estimate.estimator}").inc()
        return common_pb2.Tag(
            median_tokens=estimate.median_tokens,
            spread=estimate.spread,
            confidence=estimate.confidence,
            estimator=estimate.estimator,
        )

    def _fail(self, error: Exception) -> None:
        """Count a failure; consecutive ones open the circuit of the tagger."""
        late = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        self._metrics.tagger_failures.labels("late" if late else "failed").inc()
        if self._circuit.failed(time.monotonic()):
            log_event(log, logging.WARNING, "tagger circuit opened", reason=note_of(error))

    # Outcomes.

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Send a completed outcome to the tagger in the next batch; the oldest are dropped if it is away for long."""
        if self._channel is None or outcome.finish_reason not in COMPLETED:
            return
        self._outcomes.append(outcome if outcome.num_sequences <= 1 else _of_one_response(outcome))
        if len(self._outcomes) > MAX_KEPT:
            self._outcomes.popleft()
            self._metrics.outcomes.labels("lost").inc()
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._outcomes and not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), GATHER_S)
            await self._send_batch()

    async def _send_batch(self) -> bool:
        some = [self._outcomes.popleft() for _ in range(min(MAX_BATCH, len(self._outcomes)))]
        if not some or self._channel is None:
            return False
        try:
            request = tagger_pb2.ObserveRequest(outcomes=some)
            await self._channel.call(f"/{TAGGER}/Observe", request, tagger_pb2.ObserveResponse, timeout_s=OBSERVE_S)
        except grpc.aio.AioRpcError as error:
            refused = error.code() is grpc.StatusCode.INVALID_ARGUMENT  # a retry would not help
            if not refused:
                self._outcomes.extendleft(reversed(some))
            self._metrics.outcomes.labels("refused" if refused else "again").inc(len(some))
            log_event(log, logging.DEBUG, "outcomes not sent", num=len(some), reason=note_of(error))
            return refused
        self._metrics.outcomes.labels("sent").inc(len(some))
        return True

    async def close(self) -> None:
        """Send the remaining outcomes, if the tagger accepts them, and close the channel."""
        self._closing.set()
        if self._sending is not None:
            await self._sending
        while await self._send_batch():
            pass
        if self._channel is not None:
            await self._channel.close()


def _of_one_response(outcome: common_pb2.Outcome) -> common_pb2.Outcome:
    """Return the outcome of a request with several responses as that of one with a response of their mean length."""
    one = common_pb2.Outcome()
    one.CopyFrom(outcome)
    one.output_tokens = round(outcome.output_tokens / outcome.num_sequences)
    one.num_sequences = 0
    return one
