"""Sending what is measured: prompts that nobody has sent before, of tokens that the model has."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from predictor.fitting.measurement_batches import BatchItem
from services.http.client import Connection, HttpClient, Origin, request_head

ASK_S = 30.0
ENDLESS_S = 1e6  # who sends has a deadline of its own
MOST_BYTES = 2**20
SAMPLE = "The five boxing wizards jump quickly over 1234567890 lazy dogs, don't they? Yes: [a] {b} <c> = d/e + f."
FEWEST_WORDS = 2  # of a prompt that is not to be like any other


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request and when it was sent, and its first and last tokens came; on the monotonic clock."""

    name: str
    piece: BatchItem
    sent_s: float
    first_s: float
    last_s: float


class PromptRefusedError(ValueError):
    """The engine does not take what it is sent."""


class PromptSender:
    """Sends requests to one engine under names that hold `mine`."""

    def __init__(self, origin: Origin, mine: str, api_key: str | None = None) -> None:
        """Open nothing yet."""
        self._origin = origin
        self._mine = mine
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._client = HttpClient(connect_s=ASK_S, max_kept=4096)
        self._model = ""
        self._words: Sequence[int] = ()
        self._draw = random.Random(mine)  # noqa: S311 - prompts are no secrets
        self._num_sent = 0

    async def find_out(self) -> str:
        """Ask for the model's name, and for tokens that it knows; give the name."""
        status, body = await self._client.get(self._origin, b"/v1/models", within_s=ASK_S, headers=self._headers)
        try:
            self._model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise PromptRefusedError(f"engine_url: /v1/models answers with status {status} and no model") from None
        reply = await self._ask(b"/tokenize", {"model": self._model, "prompt": SAMPLE, "add_special_tokens": False})
        words = sorted(set(reply.get("tokens", ())))
        if len(words) < FEWEST_WORDS:
            raise PromptRefusedError("engine_url: /tokenize gives no tokens to make prompts of")
        self._words = words
        return self._model

    async def send(self, piece: BatchItem) -> Sent:
        """Send a request, and wait for all of its answer; PromptRefusedError where there is none."""
        self._num_sent += 1
        name = f"{self._mine}{self._num_sent}"
        body = {
            "model": self._model, "prompt": self._draw.choices(self._words, k=piece.prompt_tokens),
            "max_tokens": piece.output_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        encoded = json.dumps(body).encode()
        sent_s = time.monotonic()
        connection = await self._post(b"/v1/completions", encoded, [(b"x-request-id", name.encode())])
        try:
            if connection.status != 200:
                said = await connection.read_all(ASK_S, MOST_BYTES)
                raise PromptRefusedError(
                    f"engine_url: it refuses a request with status {connection.status}: {_short(said)}"
                )
            first_s = 0.0

            def take(_: bytes) -> None:
                nonlocal first_s
                first_s = first_s or connection.last_byte_s

            await connection.hand_over(take, ENDLESS_S)
            return Sent(name=name, piece=piece, sent_s=sent_s, first_s=first_s, last_s=connection.last_byte_s)
        finally:
            connection.release()

    async def send_all(self, streams: Sequence[Sequence[BatchItem]]) -> list[Sent]:
        """Send streams side by side, the requests of each one after the other."""
        sent: list[Sent] = []

        async def one(stream: Sequence[BatchItem]) -> None:
            for piece in stream:
                sent.append(await self.send(piece))  # noqa: PERF401 - what was answered counts, if the rest is not

        tasks = [asyncio.create_task(one(stream)) for stream in streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sent

    def close(self) -> None:
        """Close what is open."""
        self._client.close()

    async def _ask(self, target: bytes, fields: dict[str, Any]) -> dict[str, Any]:
        connection = await self._post(target, json.dumps(fields).encode(), [])
        try:
            said = await connection.read_all(ASK_S, MOST_BYTES)
        finally:
            connection.release()
        try:
            reply = json.loads(said)
        except ValueError:
            reply = None
        if connection.status != 200 or not isinstance(reply, dict):
            raise PromptRefusedError(
                f"engine_url: {target.decode()} answers with status {connection.status}: {_short(said)}"
            )
        return reply

    async def _post(self, target: bytes, body: bytes, headers: list[tuple[bytes, bytes]]) -> Connection:
        head = request_head(b"POST", self._origin, target, [*self._headers, *headers], len(body))
        return await self._client.send(self._origin, head, body, ENDLESS_S)


def _short(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:200]
