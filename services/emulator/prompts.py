"""The prompts of OpenAI requests as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.emulator.errors import bad_value, invalid
from services.emulator.request_bodies import CHAT, ChatBody, CompletionBody, body_from
from services.emulator.tokens import VOCABULARY, chat_text, token_ids
from services.http.openai_body import MessageError, read_messages


def prompt_of(data: Any) -> tuple[list[int], bool]:
    """Tokenize the prompt of /tokenize; return whether the tokens' texts are requested too."""
    found = data if isinstance(data, dict) else {}
    if not isinstance(found.get("prompt"), str) and "messages" not in found:
        raise invalid(
            [
                {"type": "missing", "loc": f"body.{name}", "msg": "Field required", "input": found}
                for name in ("prompt", "messages")
            ]
        )
    wants_texts = bool(data.get("return_token_strs"))
    if isinstance(data.get("prompt"), str):
        return token_ids(data["prompt"]), wants_texts
    return _prompt(body_from(CHAT, data)), wants_texts


def _prompt(body: CompletionBody | ChatBody) -> list[int]:
    if isinstance(body, ChatBody):
        if not body.messages:
            raise bad_value("Cannot apply chat template to an empty conversation. Provide at least one message.")
        return token_ids(chat_text(_messages(body.messages), continues=_continues(body)))
    return prompts_of(body)[0]


def prompts_of(body: CompletionBody | ChatBody) -> list[list[int]]:
    """Tokenize the prompts; a chat has one."""
    if isinstance(body, ChatBody):
        return [_prompt(body)]
    prompt = body.prompt
    if prompt is None or prompt == "":
        raise bad_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise bad_value("You must pass at least one prompt")
    given = prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]
    return [token_ids(one) if isinstance(one, str) else _checked_ids(one) for one in given]


def _continues(body: ChatBody) -> bool:
    """Return whether the answer continues the last message."""
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return body.continue_final_message


def _checked_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list):
        message = "Input should be a valid string, or a list of token ids"
        raise invalid([{"type": "string_type", "loc": "body.prompt", "msg": message, "input": prompt}])
    if not prompt:
        raise bad_value("You must pass at least one prompt")
    for place, token in enumerate(prompt):
        if type(token) is not int or token < 0:
            message = "Input should be a valid integer greater than or equal to 0"
            raise invalid([{"type": "int_type", "loc": f"body.prompt.{place}", "msg": message, "input": token}])
        if token >= VOCABULARY:
            raise bad_value(f"Token id {token} is out of vocabulary")
    return prompt


def _messages(messages: Sequence[Any]) -> list[tuple[str, str]]:
    """Read roles and texts; other parts than text are refused."""
    try:
        return [
            (role, "\n".join(_text(part, place, number) for number, part in enumerate(parts)))
            for place, (role, parts) in enumerate(read_messages(messages))
        ]
    except MessageError as error:
        kind, text = "string_type", "Input should be a valid string"
        if error.field == "content":
            text += " or a list of parts"
        elif error.value is None:
            kind, text = "missing", "Field required"
        where = f"body.messages.{error.place}.{error.field}"
        raise invalid([{"type": kind, "loc": where, "msg": text, "input": error.value}]) from None


def _text(part: Any, place: int, number: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_value("Only parts of type text can be read by this model.", f"body.messages.{place}.content.{number}")
    return str(part["text"])
