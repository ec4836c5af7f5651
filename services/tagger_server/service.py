"""block.v1.LengthTagger: tags for requests, and outcomes to learn from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import grpc
from prometheus_client import CollectorRegistry, Counter

from length_tagger.chain import Chain
from length_tagger.estimate import LengthOutcome, Query
from length_tagger.keys import prompt_keys
from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services.logs import log_event
from services.tagger_server.batches import Batches
from services.tagger_server.drift import Drift
from services.tagger_server.settings import ENCODER

log = logging.getLogger(__name__)

MAX_OUTCOMES = 256
MAX_KEYS = 8
HEAD_BYTES = TAIL_BYTES = 64 * 1024  # of a longer prompt the middle is not read

COMPLETE = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class TaggerService(tagger_pb2_grpc.LengthTaggerServicer):
    """Runs quick estimators on the event loop, in less than a millisecond, and slow ones before them in batches."""

    def __init__(
        self,
        chain: Chain,
        registry: CollectorRegistry,
        batches: Batches | None = None,
        record: Callable[[common_pb2.Outcome], None] = lambda _: None,
    ) -> None:
        """Serve one chain of estimators."""
        self._chain = chain
        self._batches = batches
        self._record = record
        self._tags = Counter("block_tagger_tags", "Tags, by estimator.", ("estimator",), registry=registry)
        self._outcomes = Counter("block_tagger_outcomes", "Received outcomes.", ("learned",), registry=registry)
        registry.register(Drift(chain))

    async def Tag(
        self,
        request: tagger_pb2.TagRequest,
        context: grpc.aio.ServicerContext[tagger_pb2.TagRequest, tagger_pb2.TagResponse],
    ) -> tagger_pb2.TagResponse:
        """Predict the length of one answer."""
        query = query_from(request)
        if self._batches is not None and self._chain.reaches(query, ENCODER):
            precomputed = await self._batches.estimate(query)
            query = query if precomputed is None else replace(query, precomputed=(precomputed,))
        estimate = self._chain.estimate(query)
        self._tags.labels("none" if estimate is None else estimate.estimator).inc()
        if estimate is None:
            return tagger_pb2.TagResponse()
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "tagged", request_id=request.request.request_id, model=query.model,
                median_tokens=estimate.median_tokens, spread=estimate.spread, confidence=estimate.confidence,
                estimator=estimate.estimator,
            )  # fmt: skip
        return tagger_pb2.TagResponse(
            tag=common_pb2.Tag(
                median_tokens=estimate.median_tokens,
                spread=estimate.spread,
                confidence=estimate.confidence,
                estimator=estimate.estimator,
                keys=query.keys,
            )
        )

    async def Observe(
        self,
        request: tagger_pb2.ObserveRequest,
        context: grpc.aio.ServicerContext[tagger_pb2.ObserveRequest, tagger_pb2.ObserveResponse],
    ) -> tagger_pb2.ObserveResponse:
        """Learn from the outcomes of requests."""
        if len(request.outcomes) > MAX_OUTCOMES:
            raise ValueError(f"outcomes: {len(request.outcomes)} are more than {MAX_OUTCOMES}, the maximum of one call")
        outcomes = [outcome_from(one, place) for place, one in enumerate(request.outcomes) if has_length(one)]
        for outcome in outcomes:
            self._chain.observe(outcome)
        for one in request.outcomes:
            if has_length(one):
                self._record(one)
        self._outcomes.labels("yes").inc(len(outcomes))
        self._outcomes.labels("no").inc(len(request.outcomes) - len(outcomes))
        return tagger_pb2.ObserveResponse(num_learned=len(outcomes))


def query_from(message: tagger_pb2.TagRequest) -> Query:
    """Read a request; errors name the field as it is on the wire."""
    request = message.request
    prompt = text_from(message.prompt)
    try:
        return Query(
            model=request.model,
            prompt=prompt,
            prompt_tokens=request.prompt_tokens or None,
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            min_tokens=request.min_tokens if request.HasField("min_tokens") else None,
            ignore_eos=request.ignore_eos,
            expected_tokens=request.expected_output_tokens if request.HasField("expected_output_tokens") else None,
            session_id=request.session_id,
            client_id=request.client_id,
            keys=prompt_keys(request.model, prompt),
        )
    except ValueError as error:
        raise ValueError(f"request.{str(error).replace('expected_tokens', 'expected_output_tokens', 1)}") from None


def text_from(prompt: bytes) -> str:
    """Decode a prompt; of a very long one, head and tail."""
    if len(prompt) > HEAD_BYTES + TAIL_BYTES:
        prompt = prompt[:HEAD_BYTES] + prompt[-TAIL_BYTES:]
    return prompt.decode("utf-8", "replace")


def has_length(outcome: common_pb2.Outcome) -> bool:
    """Tell whether an answer is complete, and its length was not fixed by the client."""
    fixed = outcome.tag.estimator == "client" and outcome.tag.spread == 0
    return outcome.finish_reason in COMPLETE and outcome.output_tokens > 0 and not fixed


def outcome_from(message: common_pb2.Outcome, place: int) -> LengthOutcome:
    """Read an outcome; an error names its index."""
    if len(message.tag.keys) > MAX_KEYS:
        raise ValueError(f"outcomes[{place}].tag.keys: {len(message.tag.keys)} are more than {MAX_KEYS}")
    try:
        return LengthOutcome(
            output_tokens=message.output_tokens,
            model=message.model,
            session_id=message.session_id,
            client_id=message.client_id,
            keys=tuple(message.tag.keys),
            cut=message.finish_reason == common_pb2.FINISH_REASON_LENGTH,
        )
    except ValueError as error:
        raise ValueError(f"outcomes[{place}].{error}") from None
