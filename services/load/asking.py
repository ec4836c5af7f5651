"""The requests themselves: bodies and headers whose prompts and answers have the lengths that were planned."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.http_client import Headers
from services.load.plan import Planned

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPTS = ("token-ids", "words")
OUTPUTS = ("ignore-eos", "header", "none")

COMMON = (
    "the of and to in is was for on as with by he that at from his it an were are this be had not has but she have "
    "they who one all her two new been time year also when more some can out up may its if no any what into now day"
)
WORDS = tuple(COMMON.split())  # short: one token each in nearly every vocabulary
LOWEST_ID, HIGHEST_ID = 100, 1900  # token ids that the smallest vocabularies have


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How requests are put."""

    model: str
    endpoint: str = "completions"
    prompt: str = "token-ids"  # exact where the endpoint takes them; else words
    output: str = "ignore-eos"  # with max_tokens; or a header that emulated engines know; or just max_tokens
    headers: tuple[tuple[bytes, bytes], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is not known."""
        for name, known in (("endpoint", ENDPOINTS), ("prompt", PROMPTS), ("output", OUTPUTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: {getattr(self, name)!r} is none of {', '.join(known)}")

    @property
    def target(self) -> bytes:
        """The path to send to."""
        return ENDPOINTS[self.endpoint].encode()


def body_of(one: Planned, manner: Manner) -> bytes:
    """Write a request's body; the same plan and seed give the same body."""
    draw = random.Random(f"{manner.seed} {one.request_id}")  # noqa: S311 - it is to repeat
    fields: dict[str, Any] = {"model": manner.model, "stream": True, "stream_options": {"include_usage": True}}
    if manner.output != "header":
        fields["max_tokens"] = one.output_tokens
    if manner.output == "ignore-eos":
        fields["ignore_eos"] = True
    if one.priority:
        fields["priority"] = one.priority
    if manner.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": words(one.prompt_tokens, draw)}]
    elif manner.prompt == "words":
        fields["prompt"] = words(one.prompt_tokens, draw)
    else:
        fields["prompt"] = draw.choices(range(LOWEST_ID, HIGHEST_ID), k=one.prompt_tokens)
    return json.dumps(fields).encode()


def headers_of(one: Planned, manner: Manner, request_id: str) -> Headers:
    """Write a request's headers."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *manner.headers]
    if manner.output == "header":
        headers.append((b"x-block-output-tokens", b"%d" % one.output_tokens))
    if one.slo is not None:
        for name, value in ((b"x-slo-ttft-ms", one.slo.ttft_s), (b"x-slo-tpot-ms", one.slo.tpot_s)):
            if value is not None:
                headers.append((name, b"%.3f" % (value * 1000)))
    return headers


def words(num: int, draw: random.Random) -> str:
    """Write so many words."""
    return " ".join(draw.choices(WORDS, k=num))


def header_of(text: str) -> tuple[bytes, bytes]:
    """Read `name: value`."""
    name, colon, value = (part.strip() for part in text.partition(":"))
    sound = colon and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not sound or not value.isascii() or not value.isprintable():
        raise ValueError("header: must be NAME: VALUE in printable ASCII")  # its value may be a secret
    return name.lower().encode(), value.encode()


def headers_from(texts: Sequence[str], api_key: str | None) -> tuple[tuple[bytes, bytes], ...]:
    """Read what is sent with every request."""
    headers = [header_of(text) for text in texts]
    if api_key:
        headers.append(header_of(f"authorization: Bearer {api_key}"))
    return tuple(headers)
