"""The prefill leg of a request, sent to an engine; and what its reply allows a decode leg to do."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2
from services.http.client import HttpClient
from services.http.connection import ConnectError
from services.http.headers import Headers, request_head
from services.http.kv_transfer import KvConnector, PrefilledPrompt, prefill_body, read_prefill_reply
from services.http.origin import Origin
from services.http.proxying import OK, RETRIED
from services.http.reply_format import CANCELLED, FAILED
from services.logs import log_event

log = logging.getLogger(__name__)

MAX_FAILED_FETCHES = 2  # of one request; then one engine serves it

# The results of a leg, as metrics name them.
HELD, NO_BLOCKS, INVALID, REFUSED, BROKEN, SKIPPED, LEFT = (
    "held", "no_blocks", "invalid", "refused", "failed", "skipped", "client_left",
)  # fmt: skip
REASONS = {BROKEN: FAILED, REFUSED: common_pb2.FINISH_REASON_UNSPECIFIED, SKIPPED: CANCELLED, LEFT: CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlocks:
    """KV blocks that an instance holds for the decode leg of a request."""

    instance_id: str
    prompt: PrefilledPrompt
    replied_s: float  # monotonic
    prefill_s: float  # from the request's arrival to the reply

    def may_be_fetched(self, now_s: float, within_s: float) -> bool:
        """Return whether a decode leg may still be sent."""
        return now_s - self.replied_s <= within_s

    def usable_after(self, error: Exception | None) -> bool:
        """Return whether another decode instance may use the blocks after one failed, with an error or a status.

        An engine that has received the request may have fetched the blocks, or refused the request: both free them,
        and a later fetch would read what has been written there since.
        """
        return self.prompt.params is None or isinstance(error, ConnectError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReply:
    """An engine's reply to a prefill leg."""

    status: int
    headers: Headers
    body: bytes
    leg_s: float  # from sending the leg to the end of the reply


@dataclass(slots=True, kw_only=True)
class PrefillLeg:
    """One request's prompt at one instance; `outcome` has how the leg ended."""

    request: common_pb2.Request
    instance_id: str
    policy: str
    arrived_s: float  # when the request arrived, monotonic
    result: str = LEFT
    held: HeldBlocks | None = field(default=None, init=False)
    _prefill_s: float | None = field(default=None, init=False)

    async def send(  # noqa: PLR0913 - the parts of a request
        self,
        client: HttpClient,
        origin: Origin,
        *,
        target: bytes,
        headers: Headers,
        body: bytes,
        connector: KvConnector,
        within_s: float,
        max_bytes: int,
    ) -> PrefillReply:
        """Send the prompt of a body, and wait for the reply; ConnectionError or TimeoutError where none arrives."""
        body = prefill_body(body, connector)
        head = request_head(b"POST", origin, target, headers, len(body))
        try:
            async with asyncio.timeout(within_s):
                connection = await client.send(origin, head, body, within_s)
                try:
                    reply = await connection.read_all(within_s, max_bytes)
                finally:
                    connection.release()
        except (ConnectionError, TimeoutError):
            self.result = BROKEN
            raise
        replied_s = connection.last_byte_s
        self._prefill_s = replied_s - self.arrived_s
        if connection.status == OK:
            self._read(reply, connector, replied_s)
        else:
            self.result = BROKEN if connection.status in RETRIED else REFUSED
        return PrefillReply(
            status=connection.status, headers=connection.headers, body=reply, leg_s=replied_s - connection.sent_s
        )

    def _read(self, reply: bytes, connector: KvConnector, replied_s: float) -> None:
        assert self._prefill_s is not None
        try:
            prompt = read_prefill_reply(reply, connector)
        except ValueError as error:
            self.result = INVALID
            log_event(
                log, logging.WARNING, "prefill reply invalid", request_id=self.request.request_id,
                instance_id=self.instance_id, why=str(error),
            )  # fmt: skip
            return
        self.result = NO_BLOCKS if prompt is None else HELD
        if prompt is not None:
            self.held = HeldBlocks(
                instance_id=self.instance_id, prompt=prompt, replied_s=replied_s, prefill_s=self._prefill_s
            )

    def outcome(self) -> common_pb2.Outcome:
        """Return the outcome; its instance is its prefill instance, as in no outcome of a whole request."""
        return common_pb2.Outcome(
            request_id=self.request.request_id,
            instance_id=self.instance_id,
            model=self.request.model,
            prompt_tokens=self.request.prompt_tokens,
            finish_reason=REASONS.get(self.result, common_pb2.FINISH_REASON_LENGTH),
            policy=self.policy,
            finished_unix_s=time.time(),
            prefill_instance_id=self.instance_id,
            prefill_s=self._prefill_s,
        )
