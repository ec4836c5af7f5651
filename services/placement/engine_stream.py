"""The answer of one engine to a request of Generate, as a stream of chunks that may leave an engine that drains."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from protos.block.v1 import common_pb2, scheduler_pb2
from services.http.client import HttpClient
from services.http.connection import Connection
from services.http.stream_continuation import StreamTranscript
from services.instances.draining_requests import REMOVED, MovableRequest
from services.instances.instance import Instance
from services.placement.driver import PlacementDriver
from services.placement.generation_spans import GenerationSpans, answer_recorded
from services.placement.generation_tracker import GenerationTracker
from services.placement.upstream_engine import EngineError, EngineRequest, stream_answer
from services.tracing.request_spans import DECODE, SERVE

CUT = "length"  # finish reason of an answer that has as many tokens as its request allows


class EngineStream:
    """Streams the answer of the instance that a decision has chosen."""

    def __init__(  # noqa: PLR0913 - these are its parts
        self,
        driver: PlacementDriver,
        client: HttpClient,
        spans: GenerationSpans,
        instance: Instance,
        request: EngineRequest,
        *,
        tracker: GenerationTracker,
        transcript: StreamTranscript | None,
    ) -> None:
        """Prepare the stream; the request is sent when `chunks` is read.

        The engine fetches the KV blocks that `tracker` names as held, if any. `transcript` follows an answer that may
        continue on another engine.
        """
        self._driver = driver
        self._client = client
        self._spans = spans
        self._instance = instance
        self._request = request
        self._tracker = tracker
        self._transcript = transcript
        self._hides_ids = transcript is not None and transcript.hides_ids  # that the client did not ask for
        self._is_forced = False  # the instance is removed
        self._connection: Connection | None = None  # to the engine
        self.leaves = False  # the instance drains, and the stream has been asked to leave it
        self.movable: MovableRequest | None = None  # at the instance

    async def chunks(self) -> AsyncGenerator[scheduler_pb2.Chunk | None]:
        """Yield the answer's chunks, and None where the stream is to leave and the next one has not come."""
        tracker, settings = self._tracker, self._driver.settings
        decision, held = tracker.decision, tracker.held
        self.movable = movable = self._driver.requests.enter(
            decision.instance.instance_id, self._leave if held is None else None, self._force
        )
        leg = self._spans.leg(SERVE if held is None else DECODE, decision.instance, decision.policy)
        pieces = stream_answer(
            self._client,
            self._instance,
            self._spans.traced(self._request, leg),
            (settings.first_token_s, settings.idle_s),
            prompt=None if held is None else held.prompt,
            sent=tracker.sent,
            received=self._received,
            opened=self._opened,
        )
        with answer_recorded(leg, tracker):
            try:
                async with aclosing(pieces) as open_pieces:
                    async for piece in open_pieces:
                        if self._is_forced:
                            raise EngineError(REMOVED)
                        tracker.received(piece)
                        if self.leaves and not piece.is_answer():
                            yield None
                        if piece.is_answer():
                            yield scheduler_pb2.Chunk(
                                text=piece.text,
                                token_ids=() if self._hides_ids else piece.token_ids,
                                num_tokens=len(piece.token_ids),
                                finish_reason=piece.finish_reason,
                                index=piece.index,
                            )
            except (ConnectionError, TimeoutError):
                if not tracker.is_complete:  # only the usage is missing
                    if not self._has_all_of_it():
                        raise
                    yield scheduler_pb2.Chunk(finish_reason=CUT)
            finally:
                movable.end()
            tracker.require_end()

    def _has_all_of_it(self) -> bool:
        """Return whether all tokens that the request allows have come; then set the finish reason, which is missing."""
        if self._transcript is None or self._transcript.end() is None:
            return False
        self._tracker.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return True

    def _opened(self, connection: Connection) -> None:
        self._connection = connection

    def _leave(self) -> None:
        self.leaves = True
        if self._connection is not None:
            self._connection.interrupt()

    def _force(self) -> None:
        self._is_forced = True
        if self._connection is not None:
            self._connection.interrupt()

    def _received(self, event: bytes) -> None:
        if self._transcript is not None:
            self._transcript.passed(b"data: " + event + b"\n\n")
