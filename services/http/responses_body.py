"""Bodies of /v1/responses: the values that placing a request needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.http.json_fields import count_in, description_of, flag_in, name_in
from services.http.openai_body import CONVERSE, OpenAIRequest, conversation_texts, request_in

NOT_CONTINUED = "responses"
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")  # types of parts with a text


def read_response_body(data: Mapping[str, Any]) -> OpenAIRequest:
    """Read a request for a response."""
    messages, has_all = messages_of_response(data)
    tools = data.get("tools")
    is_kept = data.get("store") is not False or flag_in(data, "background")
    earlier = name_in(data, "previous_response_id")
    plain = has_all and not tools and not earlier
    return request_in(
        data,
        [*([json.dumps(tools)] if tools else []), *conversation_texts(messages)],
        max_tokens=count_in(data, "max_output_tokens"),
        num_messages=len(messages),
        conversation=_as_chat(data, messages) if plain else None,
        why_not_continuable=NOT_CONTINUED,
        operation=CONVERSE,
        response_id=earlier,
        is_kept=is_kept,
        names_itself=bool(data.get("request_id")),
    )


def messages_of_response(data: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Read instructions and input as the messages of a chat, and whether these contain everything."""
    given = data.get("input")
    instructions = data.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise ValueError(f"instructions: must be a string, not {description_of(instructions)}")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], True
    if given is None and data.get("previous_input_messages"):
        return messages, False
    if not isinstance(given, list) or not given:
        raise ValueError(f"input: must be a string or a list of items, not {description_of(given)}")
    has_all = True
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise ValueError(f"input[{place}]: must be an object, not {description_of(item)}")
        texts = list(_texts(item))
        is_message = item.get("type", "message") == "message" and isinstance(item.get("role"), str)
        has_all = has_all and is_message and None not in texts
        content = "\n".join(text for text in texts if text is not None)
        messages.append({"role": item["role"] if is_message else str(item.get("type", ""))[:32], "content": content})
    return messages, has_all


def _texts(item: Mapping[str, Any]) -> Iterator[str | None]:
    """Give the texts of an item; None stands for a part without one, such as an image."""
    for name in ("arguments", "output"):
        if isinstance(item.get(name), str):
            yield item[name]
    content = item.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) and part.get("type") in TEXTS else None
        yield text if isinstance(text, str) else None


def _as_chat(data: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chat that the engine makes of the request, for the chat template."""
    chat: dict[str, Any] = {"messages": messages}
    if data.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = data["chat_template_kwargs"]
    reasoning = data.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat
