"""Progress and outcome of one generated answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.block.v1 import common_pb2
from services.http.prefill_leg import HeldBlocks
from services.placement.upstream_engine import EngineError, StreamChunk

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
    num_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    counted: bool = False  # by the engine
    held: HeldBlocks | None = None  # that the answer is decoded from
    hand_over_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None

    def sent(self, at_s: float) -> None:
        """Note when the request was sent."""
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
            self.finish_reason = REASONS.get(piece.finish_reason, common_pb2.FINISH_REASON_FAILED)
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
        request, entered_s = self.request, self.entered_s
        outcome = common_pb2.Outcome(
            request_id=request.request_id,
            instance_id=self.decision.instance.instance_id,
            model=request.model,
            session_id=request.session_id,
            client_id=request.client_id,
            prompt_tokens=self.prompt_tokens or request.prompt_tokens,
            output_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            prefix_hit_tokens=self.hit_tokens,
            tag=self.decision.tag if self.decision.HasField("tag") else None,
            forecast=self.decision.forecast if self.decision.HasField("forecast") else None,
            policy=self.decision.policy,
            finished_unix_s=time.time(),
            prefill_instance_id="" if self.held is None else self.held.instance_id,
            prefill_s=None if self.held is None else self.held.prefill_s,
            hand_over_s=self.hand_over_s,
        )
        if self.first_s is not None and self.last_s is not None:
            outcome.ttft_s, outcome.e2e_s = self.first_s - entered_s, self.last_s - entered_s
            outcome.tpot_s = (self.last_s - self.first_s) / max(1, self.num_tokens - 1)
        return outcome
