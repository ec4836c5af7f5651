"""Progress and outcome of one generated answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.block.v1 import common_pb2
from services.http.prefill_leg import HeldBlocks
from services.placement.outcomes import outcome_of
from services.placement.upstream_engine import EngineError, StreamChunk
from services.rpc.request_groups import num_responses_of

REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "tool_calls": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(slots=True, kw_only=True)
class GenerationTracker:
    """Follows the chunks of one answer; without an end, the client has left."""

    decision: common_pb2.Decision
    request: common_pb2.Request
    entered_s: float  # when the request entered the system, by the monotonic clock
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_CANCELLED
    num_chunks: int = 0
    num_finished: int = 0  # responses
    num_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    counted: bool = False  # by the engine
    held: HeldBlocks | None = None  # that the answer is decoded from
    hand_over_s: float | None = None
    sent_s: float | None = None
    is_released: bool = False
    is_continued: bool = False
    migration: str = ""  # why another instance goes on with the answer
    first_s: float | None = None
    last_s: float | None = None

    def sent(self, at_s: float) -> None:
        """Note when the request was sent."""
        self.sent_s = at_s
        if self.held is not None:
            self.hand_over_s = at_s - self.held.replied_s

    def received(self, piece: StreamChunk) -> None:
        """Take a chunk."""
        if piece.is_answer():
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
            self.num_chunks += 1
            if not self.counted:
                self.num_tokens += len(piece.token_ids) or bool(piece.text)
        if piece.finish_reason:
            self.num_finished += 1
            reason = REASONS.get(piece.finish_reason, common_pb2.FINISH_REASON_FAILED)
            if reason == common_pb2.FINISH_REASON_FAILED or self.num_finished >= num_responses_of(self.request):
                self.finish_reason = reason
        if piece.usage is not None:
            self._count(piece.usage)

    def _count(self, usage: Mapping[str, Any]) -> None:
        try:
            self.num_tokens = max(0, int(usage["completion_tokens"]))
            self.prompt_tokens = max(0, int(usage["prompt_tokens"]))
            self.hit_tokens = max(0, int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError("an event's usage is invalid") from None
        if self.held is not None and self.held.prompt.cached_tokens is not None:
            self.hit_tokens = self.held.prompt.cached_tokens
        self.counted = True

    @property
    def is_complete(self) -> bool:
        """Whether the engine has ended the answer."""
        return self.finish_reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)

    def require_end(self) -> None:
        """Refuse an answer that stopped before its end."""
        if self.finish_reason in (common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_FAILED):
            raise EngineError("the answer stopped before its end")

    def failed(self) -> None:
        """Record that the engine, or the connection to it, failed."""
        self.finish_reason = common_pb2.FINISH_REASON_FAILED

    def outcome(self) -> common_pb2.Outcome:
        """Return the outcome so far."""
        request, held = self.request, self.held
        return outcome_of(
            request,
            self.decision,
            instance_id=self.decision.instance.instance_id,
            policy=self.decision.policy,
            reason=self.finish_reason,
            arrived_s=self.entered_s,
            first_s=self.first_s,
            last_s=self.last_s,
            output_tokens=self.num_tokens,
            prompt_tokens=self.prompt_tokens,
            prefix_hit_tokens=self.hit_tokens,
            prefill_instance_id="" if held is None else held.instance_id,
            prefill_s=None if held is None else held.prefill_s,
            hand_over_s=self.hand_over_s,
            migration=self.migration,
        )
