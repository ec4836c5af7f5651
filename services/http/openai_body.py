"""What placing a request needs to know of its body; what is wrong is named as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.prefix.prompt import PROMPT_END_BYTES

MOST_TOKENS = 2**31 - 1
LONGEST_NAME = 256  # characters of ids and names
MOST_TOKEN_IDS = 8192  # of a prompt that came as token ids, that are kept
MESSAGE_TOKENS = 4  # what a chat template puts around each message, about


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest:
    """A request as far as placing it needs to know."""

    model: str
    stream: bool
    prompt: bytes  # head and tail at least; empty where the client sent token ids
    prompt_bytes: int  # of the whole
    prompt_tokens: int | None  # where the client sent token ids
    num_messages: int
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool
    expected_tokens: int | None
    priority: int | None  # as the engine will read it: lower runs first
    hinted_priority: int | None  # likewise, from a hint that engines do not read
    token_ids: tuple[int, ...] = ()  # the first of them, where the client sent those of one prompt
    num_prompts: int = 1
    conversation: Mapping[str, Any] | None = None  # the whole body, where it has messages


def read_body(body: bytes, *, chat: bool) -> OpenAIRequest:
    """Read the body of a (chat) completion."""
    try:
        data = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    prompts: list[list[int]] = []
    if chat:
        parts, num_messages = _messages(data)
    else:
        (parts, prompts), num_messages = _prompt(data), 0
    text = "\n".join(parts).encode("utf-8", "replace")
    limit = _count(data, "max_completion_tokens") if chat else None
    hints = _hints(data)
    return OpenAIRequest(
        model=_model(data),
        stream=_flag(data, "stream"),
        prompt=text if len(text) <= 2 * PROMPT_END_BYTES else text[:PROMPT_END_BYTES] + text[-PROMPT_END_BYTES:],
        prompt_bytes=len(text),
        prompt_tokens=sum(map(len, prompts)) if prompts else None,
        num_messages=num_messages,
        max_tokens=_count(data, "max_tokens") if limit is None else limit,
        min_tokens=_count(data, "min_tokens"),
        ignore_eos=_flag(data, "ignore_eos"),
        expected_tokens=_hinted_length(hints),
        priority=_signed(data.get("priority"), "priority"),
        hinted_priority=_hinted_priority(hints),
        token_ids=tuple(prompts[0][:MOST_TOKEN_IDS]) if len(prompts) == 1 else (),
        num_prompts=1 if chat else max(len(parts), len(prompts)),
        conversation=data if chat else None,
    )


# JSON's null means that a field is not given, as everywhere in OpenAI's.


def _model(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if model is None:
        return ""
    if not isinstance(model, str):
        raise ValueError(f"model: must be a string, not {_kind(model)}")
    if len(model) > LONGEST_NAME:
        raise ValueError(f"model: is longer than {LONGEST_NAME} characters")
    return model


def _prompt(data: Mapping[str, Any]) -> tuple[list[str], list[list[int]]]:
    """Read a text, token ids, or a list of either; give texts or token ids."""
    prompt = data.get("prompt")
    if prompt is None:
        raise ValueError("prompt: is missing")
    if isinstance(prompt, str):
        return [prompt], []
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt, []
        if all(type(item) is int for item in prompt):
            return [], [prompt]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return [], prompt
    raise ValueError("prompt: must be a string, a list of token ids, or a list of either")


def _messages(data: Mapping[str, Any]) -> tuple[list[str], int]:
    """Write a conversation down about as a chat template would."""
    messages = data.get("messages")
    if messages is None:
        raise ValueError("messages: is missing")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: must be a list of at least one message")
    parts: list[str] = []
    tools = data.get("tools")
    if tools:
        parts.append(json.dumps(tools))
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{place}]: must be an object, not {_kind(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(f"messages[{place}].role: must be a string, not {_kind(role)}")
        parts.append(role)
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        elif content is not None:
            raise ValueError(f"messages[{place}].content: must be a string or a list of parts, not {_kind(content)}")
    return parts, len(messages)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false, not {_kind(value)}")
    return value


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {_kind(value)}")
    if not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"{name}: must lie between 0 and {MOST_TOKENS}, not {value}")
    return value


def _hints(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find Dynamo's hints for agents; whatever else is in its extensions is the engine's business."""
    extensions = data.get("nvext")
    hints = extensions.get("agent_hints") if isinstance(extensions, dict) else None
    return hints if isinstance(hints, dict) else {}


def _hinted_length(hints: Mapping[str, Any]) -> int | None:
    try:
        return _count(hints, "osl") or None
    except ValueError as error:
        raise ValueError(f"nvext.agent_hints.{error}") from None


def _hinted_priority(hints: Mapping[str, Any]) -> int | None:
    """Read Dynamo's priority, where higher runs first, the other way round."""
    hinted = _signed(hints.get("priority"), "nvext.agent_hints.priority")
    return None if hinted is None else -hinted


def _signed(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{name}: must be a whole number, not {_kind(value)}")
    return bounded(value, name)


def bounded(value: int, name: str) -> int:
    """Refuse a whole number that no engine's field holds."""
    if abs(value) > MOST_TOKENS:
        raise ValueError(f"{name}: must lie between -{MOST_TOKENS} and {MOST_TOKENS}, not {value}")
    return value


def _kind(value: Any) -> str:
    """Name what JSON had instead, shortly."""
    kinds: dict[type, Callable[[Any], str]] = {
        dict: lambda _: "an object",
        list: lambda _: "a list",
        str: lambda text: repr(text if len(text) <= 40 else text[:40] + "…"),
        type(None): lambda _: "null",
        bool: lambda flag: str(flag).lower(),
    }
    return kinds.get(type(value), repr)(value)
