"""The prefill leg of a request at one instance: sent, and its reservation released when it ends."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from services.gateway.context import GatewayContext
from services.gateway.destinations import Destination
from services.gateway.incoming import Incoming
from services.http.kv_transfer import KV_CONNECTORS, read_prefill_reply
from services.http.prefill_leg import HeldBlocks, PrefillReply, send_prefill
from services.http.proxying import RETRIED
from services.logs import log_event

log = logging.getLogger(__name__)

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
FAILED = common_pb2.FINISH_REASON_FAILED
LENGTH = common_pb2.FINISH_REASON_LENGTH
UNSPECIFIED = common_pb2.FINISH_REASON_UNSPECIFIED
OK = 200

HELD, NO_BLOCKS, INVALID, REFUSED, BROKEN, SKIPPED, LEFT = RESULTS = (
    "held", "no_blocks", "invalid", "refused", "failed", "skipped", "client_left",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class PrefillAttempt:
    """Sends the leg once; `finish` must follow, however it ends."""

    context: GatewayContext
    incoming: Incoming
    destination: Destination
    held: HeldBlocks | None = None  # by the instance, after its reply
    _result: str = LEFT
    _reason: common_pb2.FinishReason.ValueType = CANCELLED
    _prefill_s: float | None = None

    async def send(self) -> PrefillReply:
        """Send the prompt, and wait for the reply; ConnectionError or TimeoutError where none arrives."""
        context, incoming, settings = self.context, self.incoming, self.context.settings
        connector = KV_CONNECTORS[settings.kv_connector]
        self._result, self._reason = BROKEN, FAILED
        try:
            reply = await send_prefill(
                context.engines,
                self.destination.origin,
                target=incoming.target,
                headers=incoming.headers,
                body=incoming.body,
                connector=connector,
                within_s=settings.first_byte_s,
                max_bytes=settings.max_answer_bytes,
            )
        except (ConnectionError, TimeoutError):
            raise
        except BaseException:
            self._result, self._reason = LEFT, CANCELLED
            raise
        self._prefill_s = reply.replied_s - incoming.arrived_s
        if reply.status != OK:
            if reply.status not in RETRIED:
                self._result, self._reason = REFUSED, UNSPECIFIED
            return reply
        context.metrics.prefill.observe(reply.replied_s - reply.sent_s)
        self._result, self._reason = HELD, LENGTH
        try:
            prompt = read_prefill_reply(reply.body, connector)
        except ValueError as error:
            self._result = INVALID
            log_event(
                log, logging.WARNING, "prefill reply invalid", request_id=incoming.request.request_id,
                instance_id=self.destination.instance_id, why=str(error),
            )  # fmt: skip
            return reply
        if prompt is None:
            self._result = NO_BLOCKS
            return reply
        self.held = HeldBlocks(
            instance_id=self.destination.instance_id,
            prompt=prompt,
            replied_s=reply.replied_s,
            prefill_s=self._prefill_s,
        )
        return reply

    def skip(self) -> None:
        """Note that the leg is not sent: the request is served whole."""
        self._result = SKIPPED

    def finish(self) -> None:
        """Count the leg, and release its reservation."""
        self.context.metrics.prefills.labels(self._result).inc()
        request, instance_id = self.incoming.request, self.destination.instance_id
        outcome = common_pb2.Outcome(
            request_id=request.request_id,
            instance_id=instance_id,
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            finish_reason=self._reason,
            policy=self.destination.policy,
            finished_unix_s=request.arrival_unix_s + time.monotonic() - self.incoming.arrived_s,
            prefill_instance_id=instance_id,
            prefill_s=self._prefill_s,
        )
        self.context.releases.put(
            common_pb2.ReleaseRequest(request_id=request.request_id, instance_id=instance_id, outcome=outcome)
        )
