"""/v1/messages of vLLM 0.32: Anthropic's replies, whole or as named events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.emulator.answers import LENGTH
from services.emulator.errors import bad_value
from services.emulator.openai import ParsedRequest, Served, request_from
from services.emulator.request_bodies import CHAT, MESSAGE
from services.emulator.tokens import chat_text, token_ids
from services.http.messages_body import messages_of

# Fields that a chat has, too; others are called differently.
SHARED = ("model", "max_tokens", "stream", "temperature", "vllm_xargs", "ignore_eos", "seed")


def message_request(data: Any, headers: Mapping[str, str], request_id: str, served: Served) -> ParsedRequest:
    """Check a request, and make its answer."""
    messages = _messages(data)
    if type(data.get("max_tokens")) is not int:
        raise bad_value("max_tokens: Field required", "max_tokens")
    chat = {name: data[name] for name in SHARED if name in data} | {"messages": messages}
    if data.get("stop_sequences"):
        chat["stop"] = data["stop_sequences"]
    return replace(request_from(CHAT, chat, headers, request_id, served), kind=MESSAGE)


def count_tokens(data: Any) -> int:
    """Count the tokens of the prompt that a conversation becomes."""
    return len(token_ids(chat_text([(one["role"], one["content"]) for one in _messages(data)])))


def _messages(data: Any) -> list[dict[str, Any]]:
    if not isinstance(data, dict):
        raise bad_value("Input should be a valid dictionary")
    if not data.get("model"):
        raise bad_value("model: Field required", "model")
    try:
        return messages_of(data)[0]
    except ValueError as error:
        raise bad_value(str(error), str(error).partition(":")[0]) from None


class MessagesReply:
    """Writes one message."""

    def __init__(self, request: ParsedRequest) -> None:
        """Write the reply to a request."""
        self._request, self._answer = request, request.answer

    def at_once(self) -> bytes:
        """Return the events that come before the engine begins: none."""
        return b""

    def first(self) -> bytes:
        """Return the events before the first token."""
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(0, 0)}
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message) + _event("content_block_start", content_block=block, index=0)

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:
        """Return the events of tokens from `start` to before `end`; after the last one, also the stream's end."""
        texts = (self._answer.text(place, place + 1) for place in range(start, end))
        deltas = ({"type": "text_delta", "text": text} for text in texts)
        events = [_event("content_block_delta", delta=delta, index=0) for delta in deltas]
        if end >= self._answer.num_tokens:
            usage = self._usage(cached_tokens, self._answer.num_tokens)
            events += (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._stop(), usage=usage),
                _event("message_stop"),
            )
        return b"".join(events)

    def whole(self, cached_tokens: int, _: dict[str, Any] | None = None, /) -> bytes:
        """Return the message in one piece."""
        content = [{"type": "text", "text": self._answer.text(0, self._answer.num_tokens)}]
        usage = self._usage(cached_tokens, self._answer.num_tokens)
        return _json({**self._message(content), **self._stop(), "usage": usage})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": f"chatcmpl-{self._request.request_id}", "type": "message", "role": "assistant"}
        return {**about, "content": content, "model": self._request.model}

    def _stop(self) -> dict[str, Any]:
        if self._answer.finish_reason == LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        sequence = self._answer.stop_reason
        return {"stop_reason": "stop_sequence" if sequence else "end_turn", "stop_sequence": sequence}

    def _usage(self, cached_tokens: int, num_tokens: int) -> dict[str, Any]:
        """Count tokens as Anthropic does: those of cached prefixes by themselves."""
        fresh = len(self._request.prompt) - cached_tokens
        return {"input_tokens": fresh, "output_tokens": num_tokens, "cache_read_input_tokens": cached_tokens}


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _json({"type": name, **fields}))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
