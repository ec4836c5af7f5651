"""Draws requests of OpenAI's API: bodies, headers and paths, right and wrong."""

from __future__ import annotations

from random import Random
from typing import Any

from scripts.fuzzing.inputs import NUMBERS, TEXTS, Values, any_json, document, written
from services.http.paths import CHAT, COMPLETIONS
from services.http.request_facts import READ

MESSAGES = (
    {"role": "user", "content": "Say hello"},
    {"role": "system", "content": [{"type": "text", "text": "Be short"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
)


def _prompt(draw: Random) -> Any:
    return draw.choice(("Say hello", "", [1, 2, 3], ["a", "b"], [[1], [2, 3]], [], [[]], [1, "a"], draw.choice(TEXTS)))


def _messages(draw: Random) -> Any:
    return [any_json(draw) if draw.random() < 0.1 else draw.choice(MESSAGES) for _ in range(draw.randrange(4))]


def _xargs(draw: Random) -> Any:
    known: Values = {
        "block_ttft_s": lambda draw: draw.choice(NUMBERS),
        "block_tpot_s": lambda draw: draw.choice((0.05, 1, draw.choice(NUMBERS))),
        "block_class": lambda draw: draw.choice(("real-time", "best-effort", "vip")),
        "block_weight": lambda draw: draw.choice(NUMBERS),
        "block_client_id": lambda draw: draw.choice(TEXTS),
        "block_session_id": lambda draw: draw.choice(TEXTS),
        "block_tag_tokens": lambda draw: draw.choice(NUMBERS),
        "block_tag_spread": lambda draw: draw.choice(NUMBERS),
        "kv_transfer_params": lambda draw: draw.choice((None, {}, {"do_remote_decode": True})),
    }
    return document(draw, {}, known)


OPTIONAL: Values = {
    "max_tokens": lambda draw: draw.choice((1, 3, 16, draw.choice(NUMBERS))),
    "min_tokens": lambda draw: draw.choice((0, 1, draw.choice(NUMBERS))),
    "max_completion_tokens": lambda draw: draw.choice((1, 3, draw.choice(NUMBERS))),
    "ignore_eos": lambda draw: draw.random() < 0.5,
    "n": lambda draw: draw.choice((1, 2, 128, draw.choice(NUMBERS))),
    "best_of": lambda draw: draw.choice((1, 2)),
    "temperature": lambda draw: draw.choice((0, 1.0, draw.choice(NUMBERS))),
    "top_p": lambda draw: draw.choice((0.5, 1)),
    "seed": lambda draw: draw.choice(NUMBERS),
    "stop": lambda draw: draw.choice((None, "a", ["a", "b"], any_json(draw))),
    "logprobs": lambda draw: draw.choice((None, 1, True)),
    "echo": lambda draw: draw.random() < 0.5,
    "suffix": lambda draw: draw.choice(TEXTS),
    "priority": lambda draw: draw.choice((0, 1, -5, draw.choice(NUMBERS))),
    "stream_options": lambda draw: draw.choice(({"include_usage": True}, {}, any_json(draw))),
    "response_format": lambda draw: draw.choice(({"type": "json_object"}, any_json(draw))),
    "tools": lambda draw: draw.choice(([], [{"type": "function", "function": {"name": "f"}}], any_json(draw))),
    "vllm_xargs": _xargs,
    "nvext": lambda draw: {
        "agent_hints": document(draw, {}, {"osl": lambda d: d.choice(NUMBERS), "priority": any_json})
    },
    "kv_transfer_params": lambda draw: draw.choice((None, {"do_remote_decode": True}, any_json(draw))),
    "return_token_ids": lambda draw: draw.choice((True, False, any_json(draw))),
    "user": lambda draw: draw.choice(TEXTS),
    "prompt_logprobs": lambda draw: draw.choice((None, 1)),
    "truncate_prompt_tokens": lambda draw: draw.choice(NUMBERS),
    "add_generation_prompt": any_json,
    "chat_template": any_json,
    "chat_template_kwargs": any_json,
}
REQUIRED: Values = {
    "model": lambda draw: draw.choice(("tiny", "tiny", "huge", None, draw.choice(TEXTS))),
    "stream": lambda draw: draw.random() < 0.5,
}
OTHERS: Values = {  # of other endpoints
    "tokens": lambda draw: draw.choice(([1, 2], [draw.choice(NUMBERS)], any_json(draw))),
    "input": lambda draw: draw.choice(("a", ["a"], [1], any_json(draw))),
    "slow": lambda draw: draw.choice(NUMBERS),
    "request_ids": lambda draw: draw.choice((["a"], any_json(draw))),
}
HEADER_VALUES = (
    b"", b"1", b"0", b"-1", b"0.5", b"500", b"nan", b"inf", b"1e999", b"9" * 30, b"9" * 5000, b"real-time",
    b"best-effort", b"true", b"false", b"shed", b"serve", b"demote", b"chat", b"a" * 300, b"\xff\xfe", b"a\tb",
    b"a,b", b" 1 ", b"1_0", b"0x1", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"Bearer x",
)  # fmt: skip
NAMES = (
    *sorted(READ), b"x-request-id", b"authorization", b"content-type", b"accept", b"accept-encoding", b"connection",
    b"expect", b"content-length", b"transfer-encoding", b"traceparent", b"tracestate", b"host", b"te", b"upgrade",
    b"x-block-instance", b"range", b"cookie", b"x-forwarded-for",
)  # fmt: skip


def body_of(draw: Random, *, chat: bool) -> bytes:
    """Draw a body."""
    kind = draw.random()
    if kind < 0.04:
        return written(draw, any_json(draw))
    prompt: Values = {"messages": _messages} if chat else {"prompt": _prompt}
    optional = {**OPTIONAL, **OTHERS} if kind < 0.2 else OPTIONAL
    return written(draw, document(draw, {**REQUIRED, **prompt}, optional))


def headers_of(draw: Random) -> list[tuple[bytes, bytes]]:
    """Draw headers beside the length."""
    more = range(draw.choice((0, 0, 1, 1, 2, 4)))
    return [(b"content-type", b"application/json"), *((draw.choice(NAMES), draw.choice(HEADER_VALUES)) for _ in more)]


def path_of(draw: Random, *, chat: bool) -> bytes:
    """Draw a path."""
    if draw.random() < 0.85:
        return CHAT if chat else COMPLETIONS
    return draw.choice(
        (b"/v1/embeddings", b"/", b"/v1//completions", b"/v1/%63ompletions", b"/metrics", b"/%00", b"/?a=b", b"*")
    )
