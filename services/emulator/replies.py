"""Replies of vLLM 0.32, whole or as server-sent events, field for field."""

from __future__ import annotations

import json
from typing import Any, Protocol

from services.emulator.errors import DONE
from services.emulator.openai import ParsedRequest
from services.emulator.request_bodies import CHAT

FINGERPRINT = "block-emulator"
TEXT = "\0"  # placeholder of an event's text while the rest of the event is written


class ReplyWriter(Protocol):
    """Writes one response."""

    def at_once(self) -> bytes:
        """Return the events that come before the engine begins."""

    def first(self) -> bytes:
        """Return the events before the first token."""

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:
        """Return the events of tokens from `start` to before `end`; after the last one, also the stream's end."""

    def whole(self, cached_tokens: int, kv_transfer_params: dict[str, Any] | None = None, /) -> bytes:
        """Return the response in one piece."""


class CompletionReply:
    """Writes one response; the parts that do not change from token to token are written once.

    With an `index` it is one of several of a request, whose usage and end are not in its events.
    """

    def __init__(self, request: ParsedRequest, created_s: int, *, index: int | None = None) -> None:
        """Write the constant parts."""
        self._request = request
        self._index = index or 0
        self._is_part = index is not None
        self._answer = request.answer
        self._is_chat = request.kind == CHAT
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        self._common: dict[str, Any] = {
            "id": f"{prefix}-{request.request_id}", "object": kind, "created": created_s, "model": request.model,
        }  # fmt: skip
        if request.stream:
            if self._is_chat:
                self._common["object"] = "chat.completion.chunk"
            self._head, self._tail = self._around_text(is_last=False)

    def at_once(self) -> bytes:
        """Return the events that come before the engine begins: none."""
        return b""

    def first(self) -> bytes:
        """Return the event before a chat's first token; nothing for a completion."""
        if not self._is_chat:
            return b""
        choice = {
            "index": self._index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        usage = {"usage": self._usage_after(0)} if self._request.continuous_usage else {}
        ids = self._prompt_ids()
        return _event({**self._common, "choices": [choice], **usage, "prompt_token_ids": ids, "prompt_text": None})

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:
        """Return the events of tokens from `start` to before `end`; after the last one, also the stream's end."""
        num_tokens = self._answer.num_tokens
        if end == start + 1 < num_tokens:
            return self._token(start)  # the usual case
        events = [self._token(place) for place in range(start, min(end, num_tokens - 1))]
        if end >= num_tokens:
            events.append(self._last_token())
            if self._is_part:
                return b"".join(events)
            if self._request.include_usage:
                events.append(self.usage_event((len(self._request.prompt), num_tokens), cached_tokens))
            events.append(DONE)
        return b"".join(events)

    def usage_event(self, counts: tuple[int, int], cached_tokens: int) -> bytes:
        """Return the event with the numbers of tokens of prompts and answers."""
        cached = {"cached_tokens": cached_tokens, **({"created_cache_tokens": 0} if self._is_chat else {})}
        usage = {**_usage_of(*counts), "prompt_tokens_details": cached}
        return _event({**self._common, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})

    def whole(self, cached_tokens: int, kv_transfer_params: dict[str, Any] | None = None, /) -> bytes:
        """Return the response in one piece; that of a prefill leg says where its KV blocks are."""
        counts = len(self._request.prompt), self._answer.num_tokens
        return self.whole_of([self.choice()], counts, cached_tokens, kv_transfer_params)

    def whole_of(
        self,
        choices: list[dict[str, Any]],
        counts: tuple[int, int],
        cached_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> bytes:
        """Return a reply with some choices, and the numbers of tokens of prompts and answers."""
        cached = {
            "cached_tokens": cached_tokens, "created_cache_tokens": 0 if self._is_chat else None,
            "multimodal_tokens": None,
        }  # fmt: skip
        usage = {**_usage_of(*counts), "prompt_tokens_details": cached, "completion_tokens_details": None}
        about = {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
        closing = {"kv_transfer_params": kv_transfer_params, "ec_transfer_params": None, "metrics": None}
        if self._is_chat:
            prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids(), "prompt_text": None}
            return _json({**self._common, "choices": choices, **about, **prompt, **closing})
        return _json({**self._common, "choices": choices, **about, **closing})

    def choice(self) -> dict[str, Any]:
        """Return the choice of a response in one piece."""
        ids = self._answer.token_ids() if self._request.returns_token_ids else None
        text = self._answer.text(0, self._answer.num_tokens)
        end = {"logprobs": None, "finish_reason": self._answer.finish_reason, "stop_reason": self._answer.stop_reason}
        if self._is_chat:
            message = {
                "role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None,
                "function_call": None, "reasoning": None,
            }  # fmt: skip
            return {"index": self._index, "message": message, **end, "token_ids": ids, "routed_experts": None}
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompt_ids()}
        return {"index": self._index, "text": text, **end, "token_ids": ids, **prompt, "routed_experts": None}

    def _token(self, place: int) -> bytes:
        text, tail = self._answer.streamed_text(place).encode(), self._tail
        if self._request.returns_token_ids:
            tail = self._with_ids(tail, place)
        if self._request.continuous_usage:
            tail = _with(tail, "usage", self._usage_after(place + 1))
        return self._head + text + tail

    def _last_token(self) -> bytes:
        num_tokens = self._answer.num_tokens
        head, tail = self._around_text(is_last=True)
        if self._request.returns_token_ids:
            tail = self._with_ids(tail, num_tokens - 1)
        if self._request.continuous_usage:
            tail = _with(tail, "usage", self._usage_after(num_tokens))
        elif not self._request.include_usage:
            tail = _with(tail, "system_fingerprint", FINGERPRINT)
        return head + self._answer.streamed_text(num_tokens - 1).encode() + tail

    def _with_ids(self, tail: bytes, place: int) -> bytes:
        """Set the id of the token at a place, and before the first one those of a completion's prompt."""
        if place == 0 and not self._is_chat:
            tail = tail.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + _json(self._prompt_ids()))
        return tail.replace(b'"token_ids":null', b'"token_ids":[%d]' % self._answer.token_id(place))

    def _prompt_ids(self) -> list[int] | None:
        return list(self._request.prompt) if self._request.returns_token_ids else None

    def _around_text(self, *, is_last: bool) -> tuple[bytes, bytes]:
        """Return what is before and after the text of an event."""
        reason, stop = (self._answer.finish_reason, self._answer.stop_reason) if is_last else (None, None)
        choice: dict[str, Any] = {"index": self._index}
        choice |= {"delta": {"content": TEXT}} if self._is_chat else {"text": TEXT}
        choice |= {"logprobs": None, "finish_reason": reason}
        if not self._is_chat:
            choice |= {"stop_reason": stop, "prompt_token_ids": None}
        elif is_last:
            choice |= {"stop_reason": stop}
        choice |= {"token_ids": None}
        head, _, tail = _event({**self._common, "choices": [choice]}).partition(_json(TEXT)[1:-1])
        return head, tail

    def _usage_after(self, num_tokens: int) -> dict[str, Any]:
        """Return the usage in events that are not the last."""
        usage = _usage_of(len(self._request.prompt), num_tokens)
        return {**usage, **({"completion_tokens_details": None} if self._is_chat else {})}


def _usage_of(num_prompt: int, num_tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_tokens, "completion_tokens": num_tokens}


def _with(tail: bytes, name: str, value: Any) -> bytes:
    """Append a field to an event."""
    return tail.removesuffix(b"}\n\n") + b"," + _json(name) + b":" + _json(value) + b"}\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
