"""The words of vLLM 0.32's replies, whole or as server-sent events, byte for byte."""

from __future__ import annotations

import json
from typing import Any

from services.emulator.openai import CHAT, Ask
from services.emulator.refusals import RefusedError

FINGERPRINT = "block-emulator"
DONE = b"data: [DONE]\n\n"


class Reply:
    """Writes one answer; what does not change from token to token is spelled out once."""

    def __init__(self, ask: Ask, created_s: int) -> None:
        """Prepare to answer."""
        self._ask = ask
        self._chat = ask.kind == CHAT
        kind = "chat.completion" if self._chat else "text_completion"
        self._id = f"chatcmpl-{ask.request_id}" if self._chat else f"cmpl-{ask.request_id}"
        self._common = {"id": self._id, "object": kind, "created": created_s, "model": ask.model}
        if ask.stream:
            self._spell_events()

    def first(self) -> bytes:
        """The event before a chat's first token; nothing before that of a completion."""
        if not self._chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage(0)} if self._ask.continuous_usage else {}
        ids = {"prompt_token_ids": None, "prompt_text": None}
        return _event({**self._chunk_common, "choices": [choice], **usage, **ids})

    def events(self, start: int, end: int, cached_tokens: int) -> bytes:
        """The events of tokens from `start` to before `end`; behind the last one also what closes the stream."""
        answer = self._ask.answer
        text, head, tail = answer.text, self._head, self._tail
        if self._ask.continuous_usage:
            last = min(end, answer.num_tokens - 1)
            events = [self._event_with_usage(place) for place in range(start, last)]
        else:
            last = min(end, answer.num_tokens - 1)
            events = [head + text(place, place + 1).encode() + tail for place in range(start, last)]
        if end >= answer.num_tokens:
            events.append(self._last_event())
            if self._ask.include_usage:
                usage = self._usage(answer.num_tokens, cached_tokens)
                events.append(
                    _event({**self._chunk_common, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT})
                )
            events.append(DONE)
        return b"".join(events)

    def whole(self, cached_tokens: int) -> bytes:
        """The answer in one piece."""
        answer = self._ask.answer
        text = answer.text(0, answer.num_tokens)
        usage = {
            **self._usage(answer.num_tokens),
            "prompt_tokens_details": {
                "cached_tokens": cached_tokens,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }
        ended: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        closing = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        about = {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
        nothing = {"prompt_logprobs": None, "prompt_token_ids": None}
        if not self._chat:
            choice: dict[str, Any] = {
                "index": 0,
                "text": text,
                **ended,
                "token_ids": None,
                **nothing,
                "routed_experts": None,
            }
            return _json({**self._common, "choices": [choice], **about, **closing})
        message: dict[str, Any] = {
            "role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None,
            "function_call": None, "reasoning": None,
        }  # fmt: skip
        choice = {"index": 0, "message": message, **ended, "token_ids": None, "routed_experts": None}
        return _json({**self._common, "choices": [choice], **about, **nothing, "prompt_text": None, **closing})

    def _spell_events(self) -> None:
        self._chunk_common = {**self._common, **({"object": "chat.completion.chunk"} if self._chat else {})}
        self._head, self._tail = self._around_text(finished=False)

    def _around_text(self, *, finished: bool) -> tuple[bytes, bytes]:
        """What stands before and behind the text of an event."""
        mark = "\0"
        answer = self._ask.answer
        reason = answer.finish_reason if finished else None
        if self._chat:
            stop = {"stop_reason": answer.stop_reason} if finished else {}
            choice: dict[str, Any] = {
                "index": 0, "delta": {"content": mark}, "logprobs": None, "finish_reason": reason, **stop,
                "token_ids": None,
            }  # fmt: skip
        else:
            choice = {
                "index": 0, "text": mark, "logprobs": None, "finish_reason": reason,
                "stop_reason": answer.stop_reason if finished else None, "prompt_token_ids": None, "token_ids": None,
            }  # fmt: skip
        whole = _event({**self._chunk_common, "choices": [choice]})
        head, _, tail = whole.partition(json.dumps(mark)[1:-1].encode())
        return head, tail

    def _event_with_usage(self, place: int) -> bytes:
        text = self._ask.answer.text(place, place + 1).encode()
        return self._head + text + _with(self._tail, "usage", self._usage(place + 1))

    def _last_event(self) -> bytes:
        answer = self._ask.answer
        head, tail = self._around_text(finished=True)
        if self._ask.continuous_usage:
            tail = _with(tail, "usage", self._usage(answer.num_tokens))
        elif not self._ask.include_usage:
            tail = _with(tail, "system_fingerprint", FINGERPRINT)
        return head + answer.text(answer.num_tokens - 1, answer.num_tokens).encode() + tail

    def _usage(self, num_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
        num_prompt = len(self._ask.prompt)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt, "total_tokens": num_prompt + num_tokens, "completion_tokens": num_tokens,
        }  # fmt: skip
        if cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


def failed(error: RefusedError) -> bytes:
    """The events that end a stream whose engine has failed."""
    return b"data: " + error.body() + b"\n\n" + DONE


def _with(tail: bytes, name: str, value: Any) -> bytes:
    """Add a field behind the others of an event's end."""
    return tail.removesuffix(b"}\n\n") + b"," + _json(name) + b":" + _json(value) + b"}\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
