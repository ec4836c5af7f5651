"""Bodies of Anthropic's /v1/messages: the values that placing a request needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.http.json_fields import count_in, description_of
from services.http.openai_body import CONVERSE, OpenAIRequest, conversation_texts, request_in

NOT_CONTINUED = "messages"


def read_message_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read a request for a message."""
    messages, has_all = messages_of(data)
    tools = data.get("tools")
    plain = has_all and not tools and not data.get("thinking") and not data.get("output_config")
    chat = {"messages": messages, "chat_template_kwargs": data.get("chat_template_kwargs")}
    return request_in(
        data,
        [*([json.dumps(tools)] if tools else []), *conversation_texts(messages)],
        max_tokens=count_in(data, "max_tokens"),
        num_messages=len(messages),
        conversation=chat if plain else None,
        why_not_continuable=NOT_CONTINUED,
        operation=CONVERSE,
    )


def messages_of(data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Read `system` and `messages` as the messages of a chat, and whether these contain everything."""
    given = data.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("messages: must be a list of at least one message")
    messages, has_all = [], True
    if data.get("system") is not None:
        texts = list(_texts("system", data["system"]))
        messages.append({"role": "system", "content": "\n".join(text for text in texts if text is not None)})
        has_all = None not in texts
    for place, message in enumerate(given):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{place}]: must be an object, not {description_of(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError(f"messages[{place}].role: must be a string, not {description_of(role)}")
        texts = list(_texts(f"messages[{place}].content", message.get("content")))
        messages.append({"role": role, "content": "\n".join(text for text in texts if text is not None)})
        has_all = has_all and None not in texts
    return messages, has_all


def _texts(field: str, content: Any) -> Iterator[str | None]:
    """Give the texts of a content; None stands for a block that is more, or other, than a text."""
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise ValueError(f"{field}: must be a string or a list of blocks, not {description_of(content)}")
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            yield block["text"]
            continue
        if kind == "tool_use":
            yield json.dumps(block.get("input"))
        elif kind == "tool_result":
            yield _result_text(block.get("content"))
        yield None


def _result_text(content: Any) -> str:
    """Return the text of a tool's result."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
