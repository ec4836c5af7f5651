"""Sends the requests of a measurement: random prompts of tokens that the model has, so that none is cached."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predictor.fitting.measurement_batches import BatchItem
from services.http.client import HttpClient
from services.http.connection import Connection
from services.http.engine_identity import EngineIdentity, engine_identity
from services.http.headers import request_head
from services.http.origin import Origin

TIMEOUT_S = 30.0
NO_TIMEOUT_S = 1e6  # the caller has a deadline of its own
MAX_BYTES = 2**20
MAX_METRICS_BYTES = 2**24
NO_FIELDS: Mapping[str, Any] = {}
SAMPLE = "The five boxing wizards jump quickly over 1234567890 lazy dogs, don't they? Yes: [a] {b} <c> = d/e + f."
MIN_TOKENS = 2  # different tokens that prompts are made of


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """A request, and the times at which it was sent and its first and last tokens came, on the monotonic clock."""

    name: str
    item: BatchItem
    sent_s: float
    first_s: float
    last_s: float


class PromptRefusedError(ValueError):
    """The engine refuses a request."""


class PromptSender:
    """Sends requests to one engine, with ids that contain `id_prefix`."""

    def __init__(
        self, origin: Origin, id_prefix: str, api_key: str | None = None, *, setting: str = "engine_url"
    ) -> None:
        """Prepare; connections are opened when needed. `setting` is what errors call the engine."""
        self._origin = origin
        self._setting = setting
        self._id_prefix = id_prefix
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._client = HttpClient(connect_s=TIMEOUT_S, max_kept=4096)
        self._model = ""
        self._token_ids: Sequence[int] = ()
        self._draw = random.Random(id_prefix)  # noqa: S311 - prompts need no secure randomness
        self._num_sent = 0

    async def connect(self) -> str:
        """Request the model's name and some of its tokens; return the name."""
        status, body = await self._client.get(self._origin, b"/v1/models", within_s=TIMEOUT_S, headers=self._headers)
        try:
            self._model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise PromptRefusedError(f"{self._setting}: /v1/models answers with status {status} and no model") from None
        fields = {"model": self._model, "prompt": SAMPLE, "add_special_tokens": False}
        reply = await self._post_json(b"/tokenize", fields)
        token_ids = sorted(set(reply.get("tokens", ())))
        if len(token_ids) < MIN_TOKENS:
            raise PromptRefusedError(f"{self._setting}: /tokenize returns too few tokens to make prompts")
        self._token_ids = token_ids
        return self._model

    def prompt(self, num_tokens: int) -> list[int]:
        """Draw a prompt."""
        return self._draw.choices(self._token_ids, k=num_tokens)

    async def send(
        self, item: BatchItem, prompt: Sequence[int] | None = None, fields: Mapping[str, Any] = NO_FIELDS
    ) -> SentRequest:
        """Send a request and read its whole response; PromptRefusedError if the engine refuses it."""
        self._num_sent += 1
        name = f"{self._id_prefix}{self._num_sent}"
        prompt = self.prompt(item.prompt_tokens) if prompt is None else prompt
        encoded = json.dumps({**self._body(prompt, item.output_tokens), "stream": True, **fields}).encode()
        sent_s = time.monotonic()
        connection = await self._post(b"/v1/completions", encoded, [(b"x-request-id", name.encode())])
        try:
            if connection.status != 200:
                reply_text = await connection.read_all(TIMEOUT_S, MAX_BYTES)
                raise PromptRefusedError(
                    f"{self._setting}: it refuses a request with status {connection.status}: {_short(reply_text)}"
                )
            first_s = 0.0

            def take(_: bytes) -> None:
                nonlocal first_s
                first_s = first_s or connection.last_byte_s

            await connection.hand_over(take, NO_TIMEOUT_S)
            return SentRequest(name=name, item=item, sent_s=sent_s, first_s=first_s, last_s=connection.last_byte_s)
        finally:
            connection.release()

    async def answer(self, prompt: Sequence[int], num_tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its response, which comes in one piece."""
        return await self._post_json(b"/v1/completions", {**self._body(prompt, num_tokens), **fields})

    async def metrics(self) -> str:
        """Read the engine's metrics."""
        status, body = await self._client.get(
            self._origin, b"/metrics", within_s=TIMEOUT_S, headers=self._headers, max_bytes=MAX_METRICS_BYTES
        )
        if status != 200:
            raise PromptRefusedError(f"{self._setting}: /metrics answers with status {status}")
        return body.decode(errors="replace")

    async def identity(self) -> EngineIdentity:
        """Ask for its version and its model."""
        try:
            return await engine_identity(self._client, self._origin, self._headers)
        except ValueError as error:
            raise PromptRefusedError(f"{self._setting}: {error}") from None

    def _body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip

    async def send_all(self, streams: Sequence[Sequence[BatchItem]]) -> list[SentRequest]:
        """Send streams in parallel, the requests of each stream one after the other."""
        sent: list[SentRequest] = []

        async def one(stream: Sequence[BatchItem]) -> None:
            for item in stream:
                sent.append(await self.send(item))  # noqa: PERF401 - answered requests count even if later ones fail

        tasks = [asyncio.create_task(one(stream)) for stream in streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sent

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def _post_json(self, target: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        connection = await self._post(target, json.dumps(fields).encode(), [])
        try:
            reply_text = await connection.read_all(TIMEOUT_S, MAX_BYTES)
        finally:
            connection.release()
        try:
            reply = json.loads(reply_text)
        except ValueError:
            reply = None
        if connection.status != 200 or not isinstance(reply, dict):
            raise PromptRefusedError(
                f"{self._setting}: {target.decode()} answers with status {connection.status}: {_short(reply_text)}"
            )
        return reply

    async def _post(self, target: bytes, body: bytes, headers: list[tuple[bytes, bytes]]) -> Connection:
        head = request_head(b"POST", self._origin, target, [*self._headers, *headers], len(body))
        return await self._client.send(self._origin, head, body, NO_TIMEOUT_S)


def _short(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:200]
