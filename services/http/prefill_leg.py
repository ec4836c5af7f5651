"""A prefill leg, sent to an engine; and what its reply allows a decode leg to do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.http.client import ConnectError, Headers, HttpClient, Origin, request_head
from services.http.kv_transfer import KvConnector, PrefilledPrompt, prefill_body


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReply:
    """An engine's reply to a prefill leg."""

    status: int
    headers: Headers
    body: bytes
    sent_s: float  # monotonic: when the request was sent
    replied_s: float  # monotonic: when the reply was complete


async def send_prefill(  # noqa: PLR0913 - the parts of a request
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
    """Have an engine compute the prompt of a body; ConnectionError or TimeoutError where no reply arrives."""
    body = prefill_body(body, connector)
    head = request_head(b"POST", origin, target, headers, len(body))
    async with asyncio.timeout(within_s):
        connection = await client.send(origin, head, body, within_s)
        try:
            return PrefillReply(
                body=await connection.read_all(within_s, max_bytes),
                status=connection.status,
                headers=connection.headers,
                sent_s=connection.sent_s,
                replied_s=connection.last_byte_s,
            )
        finally:
            connection.release()


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

    def survive(self, error: Exception | None) -> bool:
        """Return whether another decode instance may use the blocks after one failed, with an error or a status.

        An engine that has received the request may have fetched the blocks, or refused the request: both free them,
        and whoever fetches them afterwards reads what has been written there since.
        """
        return self.prompt.params is None or isinstance(error, ConnectError)
