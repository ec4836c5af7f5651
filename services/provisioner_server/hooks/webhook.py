"""`webhook`: an HTTP POST of the action as JSON, signed, with the action's id as its idempotency key.

`x-block-signature` is `sha256=` and the HMAC-SHA256, in hexadecimal, of `x-block-timestamp`, a full stop and the body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import random
import ssl
import time
from urllib.parse import urlsplit

from protos.block.v1 import provisioner_pb2 as pb
from scheduler.backoff import Backoff
from services.http.client import HttpClient
from services.http.headers import request_head
from services.http.origin import origin_of
from services.logs import log_event
from services.provisioner_server.hooks import Hook, HookError, require_done
from services.provisioner_server.hooks.command import MAX_BYTES, reply_from
from services.provisioner_server.journal import as_plain

log = logging.getLogger(__name__)

RETRIABLE = (408, 425, 429)  # and all from 500 on


class Webhook(Hook):
    """Posts each action until the receiver accepts it."""

    def __init__(  # noqa: PLR0913 - the settings of this hook
        self, url: str, secret: str, *, timeout_s: float = 30.0, attempts: int = 6, first_pause_s: float = 0.5,
        max_pause_s: float = 30.0,
    ) -> None:  # fmt: skip
        """Check the URL and the secret."""
        if not secret:
            raise ValueError("webhook_secret: is missing: actions must be signed")
        parts = urlsplit(url)
        try:
            self._origin = origin_of(f"{parts.scheme}://{parts.netloc}")
        except ValueError as error:
            raise ValueError(f"webhook: {error}") from None
        self._target = (parts.path or "/").encode() + (b"?" + parts.query.encode() if parts.query else b"")
        self._secret, self._timeout_s = secret.encode(), timeout_s
        self._attempts = attempts
        self._pauses = Backoff(first_s=first_pause_s, max_s=max_pause_s, random=random.random)
        self._client = HttpClient(tls=ssl.create_default_context() if parts.scheme == "https" else None)

    async def act(self, action: pb.Action) -> pb.HookReply:
        """Post it, and retry after pauses that double."""
        for attempt in range(1, self._attempts + 1):
            try:
                return require_done(await self._post(action, attempt), action)
            except (ConnectionError, TimeoutError) as error:
                failure = HookError(f"webhook: {error or 'no response in time'}")
            except HookError as error:
                if error.permanent:
                    raise
                failure = error
            log_event(
                log, logging.WARNING, "webhook failed", action=action.action_id, attempt=attempt, reason=str(failure)
            )
            if attempt == self._attempts:
                raise failure
            await asyncio.sleep(self._pauses.pause_s(attempt - 1))
        raise AssertionError("there is a last attempt")

    async def _post(self, action: pb.Action, attempt: int) -> pb.HookReply:
        sent = pb.Action()
        sent.CopyFrom(action)
        sent.attempt = attempt
        body = json.dumps(as_plain(sent)).encode()
        at = str(int(time.time()))
        headers = [
            (b"content-type", b"application/json"),
            (b"idempotency-key", action.action_id.encode()),
            (b"x-block-timestamp", at.encode()),
            (b"x-block-signature", signature(self._secret, at, body).encode()),
        ]
        head = request_head(b"POST", self._origin, self._target, headers, len(body))
        async with asyncio.timeout(self._timeout_s):
            connection = await self._client.send(self._origin, head, body, self._timeout_s)
            try:
                response = await connection.read_all(self._timeout_s, MAX_BYTES)
                status = connection.status
            finally:
                connection.release()
        if status >= 500 or status in RETRIABLE:
            raise HookError(f"webhook: status {status}")
        if not 200 <= status < 300:
            raise HookError(f"webhook: status {status}: {response[:200].decode(errors='replace')}", permanent=True)
        return reply_from(response, "webhook")

    async def close(self) -> None:
        """Close connections."""
        self._client.close()


def signature(secret: bytes, timestamp: str, body: bytes) -> str:
    """Sign a timestamp and a body."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
