"""Whether the stream of a request can continue on another engine, as far as the request shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IDS_FIELD = "return_token_ids"  # of vLLM's requests

GRAMMARS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
)  # fmt: skip


def why_not_continuable(data: Mapping[str, Any], *, chat: bool) -> str:
    """Return why a request's stream cannot continue on another engine; empty where it can."""
    get = data.get
    if (get("n") or 1) != 1 or (get("best_of") or 1) != 1 or get("use_beam_search"):
        return "several_answers"
    if get("logprobs") or get("top_logprobs") or get("prompt_logprobs") is not None:
        return "logprobs"
    if get("echo"):
        return "prompt"
    if any(get(name) for name in GRAMMARS) or _has_format(get("response_format")):
        return "structured_output"
    if get("tools") and get("tool_choice") != "none":
        return "tools"
    if chat:
        return "media" if has_other_parts(get("messages") or ()) else ""
    return _why_not_by_prompt(data)


def has_other_parts(messages: Sequence[Any]) -> bool:
    """Return whether a conversation contains anything but text, such as images."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return any(
        isinstance(part, dict) and part.get("text") is None
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _why_not_by_prompt(data: Mapping[str, Any]) -> str:
    prompt = data.get("prompt")
    if data.get("suffix") or data.get("prompt_embeds") is not None:
        return "prompt"
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt))
    return "" if is_one else "several_prompts"


def _has_format(given: Any) -> bool:
    return isinstance(given, dict) and given.get("type", "text") != "text"
