"""The response to a placed request, read while it passes: its first byte, its end, and its outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.endpoint_picker.endpoints import EndpointTable
from services.endpoint_picker.metrics import PickerMetrics
from services.endpoint_picker.pick_spans import PickSpans
from services.http.data_parallel import rank_of
from services.http.openai_body import OpenAIRequest
from services.http.prompt_tokens import PromptSizes
from services.http.proxying import OK, RETRIED
from services.http.reply_format import CANCELLED, FAILED, ReplyFormat
from services.http.sse import Ending, StreamReader, ending_of
from services.placement.driver import PlacementDriver
from services.placement.outcomes import outcome_of

UNSPECIFIED = common_pb2.FINISH_REASON_UNSPECIFIED
LENGTH = common_pb2.FINISH_REASON_LENGTH
MAX_KEPT_BYTES = 2**20  # the end of a response in one piece, which has its usage
NOTHING = Ending(finish_reason=UNSPECIFIED, output_tokens=0, prompt_tokens=None)


@dataclass(slots=True, kw_only=True)
class ResponseReader:
    """Reads one response; `finish` reports the outcome, and ends the reservation. Only its first call counts."""

    driver: PlacementDriver
    endpoints: EndpointTable
    metrics: PickerMetrics
    spans: PickSpans
    sizes: PromptSizes
    form: ReplyFormat
    openai: OpenAIRequest
    request: common_pb2.Request
    decision: common_pb2.Decision
    arrived_s: float  # monotonic

    _is_stream: bool = False
    _instance_id: str | None = field(init=False)  # that serves it; None: no instance that is known
    _status: int = 0
    _reader: StreamReader = field(init=False)
    _body: bytearray = field(default_factory=bytearray)
    _first_s: float | None = None
    _last_s: float | None = None
    _is_prefilling: bool = field(init=False)
    _is_finished: bool = False

    def __post_init__(self) -> None:
        """The instance of the decision serves, until the proxy says otherwise."""
        self._instance_id = self.decision.instance.instance_id
        self._reader = StreamReader(self.form)
        self._is_prefilling = self.decision.HasField("prefill")

    def started(self, status: int, served: str | None, *, is_stream: bool) -> None:
        """Take the status, and the endpoint that served, where the proxy names it."""
        self._status, self._is_stream = status, is_stream
        self._correct(served)
        if status in RETRIED:
            self.finish(FAILED)
        elif status == OK:
            self._end_prefill(LENGTH)

    def _correct(self, served: str | None) -> None:
        """Move the request to the instance that serves it, where the proxy could not use the first endpoint."""
        chosen = self.decision.instance
        if not served or served == self.endpoints.endpoint_of(chosen):
            return
        self._instance_id = self.endpoints.instance_at(served, rank_of(chosen))
        self.metrics.served_elsewhere.labels("retried" if self._instance_id else "unknown").inc()
        self.spans.served_by(self._instance_id)
        self.driver.outcomes.ended(self._outcome(chosen.instance_id, NOTHING, FAILED))
        if self._instance_id is not None:
            self.driver.sent_elsewhere(self.request, self._instance_id)

    def received(self, piece: bytes) -> None:
        """Take a part of the body."""
        if not piece:
            return
        self._last_s = time.monotonic()
        if not self._is_stream:
            self._body += piece
            if len(self._body) > 2 * MAX_KEPT_BYTES:
                del self._body[:-MAX_KEPT_BYTES]
            return
        if self._first_s is None:
            self._first_s = self._last_s
        self._reader.feed(piece)

    def ended(self) -> None:
        """Take the end of the response."""
        if self._is_stream:
            self._reader.rest()
        self.finish()

    def stream_ended(self, *, is_shown: bool) -> None:
        """Take the end of the proxy's stream: the client has left, unless the response is over.

        Where responses are not shown, that is unknown, and a reservation ends when the engine shows the request.
        """
        if is_shown:
            self.finish(CANCELLED)
        elif self._status:
            self.finish(UNSPECIFIED)
        self.spans.ended(self._status, None)  # unless they have ended

    def finish(self, reason: common_pb2.FinishReason.ValueType | None = None) -> None:
        """Report the outcome, by default that of the response."""
        if self._is_finished:
            return
        self._is_finished = True
        self._end_prefill(CANCELLED if reason is None else reason)
        if self._instance_id is None:
            self.spans.ended(self._status, None)
            return
        ending = self._ending()
        outcome = self._outcome(self._instance_id, ending, ending.finish_reason if reason is None else reason)
        self._count(outcome)
        self.spans.ended(self._status, outcome)
        if ending.prompt_tokens:
            self.sizes.learn(self.openai, ending.prompt_tokens)
        self.driver.outcomes.ended(outcome)

    def _ending(self) -> Ending:
        if self._status != OK:
            return NOTHING
        return self._reader.ending() if self._is_stream else ending_of(bytes(self._body), self.form)

    def _end_prefill(self, reason: common_pb2.FinishReason.ValueType) -> None:
        """End the prefill leg: its engine has done its part as soon as a response comes."""
        if not self._is_prefilling:
            return
        self._is_prefilling = False
        instance_id = self.decision.prefill.instance.instance_id
        self.driver.outcomes.ended(
            common_pb2.Outcome(
                request_id=self.request.request_id,
                instance_id=instance_id,
                model=self.request.model,
                prompt_tokens=self.request.prompt_tokens,
                finish_reason=CANCELLED if reason == FAILED else reason,  # it is unknown which of the two failed
                policy=self.decision.policy,
                finished_unix_s=time.time(),
                prefill_instance_id=instance_id,
            )
        )

    def _outcome(
        self, instance_id: str, ending: Ending, reason: common_pb2.FinishReason.ValueType
    ) -> common_pb2.Outcome:
        decision = self.decision
        return outcome_of(
            self.request,
            decision,
            instance_id=instance_id,
            policy=decision.policy,
            reason=reason,
            arrived_s=self.arrived_s,
            first_s=self._first_s,
            last_s=self._last_s,
            output_tokens=ending.output_tokens,
            prompt_tokens=ending.prompt_tokens,
            prefill_instance_id=decision.prefill.instance.instance_id if decision.HasField("prefill") else "",
        )

    def _count(self, outcome: common_pb2.Outcome) -> None:
        self.metrics.output_tokens.inc(outcome.output_tokens)
        if outcome.HasField("ttft_s"):
            self.metrics.ttft.observe(outcome.ttft_s)
        if outcome.finish_reason == CANCELLED:
            self.metrics.clients_left.inc()
        elif outcome.finish_reason != FAILED:
            self.metrics.e2e.observe(outcome.e2e_s)
