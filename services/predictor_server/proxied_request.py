"""What a mirror needs to know of a request's body; a body that makes no sense is the engine's to refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predictor.lengths import Tag
from services.http.openai_body import OpenAIRequest, read_body

MOST_SAMPLES = 128
TAG_TOKENS, TAG_SPREAD = "block_tag_tokens", "block_tag_spread"
TOLD_WITH_MESSAGES = ("tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxiedRequest:
    """One body: what the gateway would read in it, and how many engine requests it makes."""

    ask: OpenAIRequest
    num_prompts: int
    num_samples: int
    tag: Tag | None
    to_tokenize: Mapping[str, Any] | None  # what to ask the engine's /tokenize; None where nothing is to be counted

    @property
    def num_requests(self) -> int:
        """How many requests the engine makes of it."""
        return self.num_prompts * self.num_samples

    @property
    def known_tokens(self) -> int | None:
        """How long its answer will be, where that is certain."""
        return self.ask.max_tokens or None if self.ask.ignore_eos else None


def proxied_request_from(body: bytes, *, chat: bool) -> ProxiedRequest | None:
    """Read a body; None where it makes no sense."""
    try:
        ask = read_body(body, chat=chat)
    except ValueError:
        return None
    data = json.loads(body)
    samples = data.get("n")
    prompt = data.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return ProxiedRequest(
        ask=ask,
        num_prompts=len(prompt) if several and not chat else 1,
        num_samples=samples if type(samples) is int and 1 <= samples <= MOST_SAMPLES else 1,
        tag=_tag(data, ask),
        to_tokenize=_to_tokenize(data, chat=chat),
    )


def _tag(data: Mapping[str, Any], ask: OpenAIRequest) -> Tag | None:
    """The length that was predicted for the answer, where the request says so, or else its client's own estimate."""
    extra = data.get("vllm_xargs")
    tokens = extra.get(TAG_TOKENS) if isinstance(extra, dict) else None
    try:
        if tokens is not None and isinstance(extra, dict):
            return Tag(median_tokens=float(tokens), spread=float(extra.get(TAG_SPREAD, 0.0)))
        return Tag(median_tokens=float(ask.expected_tokens)) if ask.expected_tokens else None
    except (TypeError, ValueError):
        return None


def _to_tokenize(data: Mapping[str, Any], *, chat: bool) -> Mapping[str, Any] | None:
    model = {} if data.get("model") is None else {"model": data["model"]}
    if chat:
        more = {name: data[name] for name in TOLD_WITH_MESSAGES if name in data}
        return {**model, "messages": data["messages"], **more}
    return {**model, "prompt": data["prompt"]} if isinstance(data.get("prompt"), str) else None
