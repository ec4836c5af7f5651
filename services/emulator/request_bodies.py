"""The bodies of OpenAI requests: their fields, as vLLM checks them."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.emulator.errors import bad_value, invalid, malformed, mistyped

COMPLETION, CHAT = "completion", "chat"
RESPONSE, MESSAGE, TRANSCRIPT = "response", "message", "transcript"  # which other modules read
NOT_EMULATED = ("echo", "logprobs", "prompt_logprobs", "use_beam_search", "suffix", "prompt_embeds")


class StreamOptions(BaseModel):
    """Whether a stream reports usage, and how often."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(BaseModel):
    """The fields of both kinds of requests; other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    priority: int = Field(default=0, ge=-(2**31), le=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    temperature: float | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class CompletionBody(_Body):
    """The body of /v1/completions."""

    prompt: Any = None


class ChatBody(_Body):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parsed(data: bytes) -> Any:
    """Parse a body."""
    if not data:
        raise invalid([{"type": "missing", "loc": "body", "msg": "Field required", "input": None}])
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(error if isinstance(error, ValueError) else ValueError("nested too deeply")) from None


def body_from(kind: str, data: Any) -> CompletionBody | ChatBody:
    """Check the fields of a body."""
    if not isinstance(data, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid([{"type": "model_attributes_type", "loc": "body", "msg": message, "input": data}])
    if data.get("stream_options") and not data.get("stream"):
        raise bad_value("Stream options can only be defined when `stream=True`.", "stream_options")
    for name in NOT_EMULATED:
        if data.get(name):
            raise bad_value(f"{name} is not emulated.", name)
    try:
        return CompletionBody.model_validate(data) if kind == COMPLETION else ChatBody.model_validate(data)
    except ValidationError as error:
        raise mistyped(error) from None
