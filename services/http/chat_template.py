"""Conversations as text, by the model's chat template, as engines write them before they tokenise them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from services.logs import log_event

log = logging.getLogger(__name__)

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"  # beside a model's tokenizer.json
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ENGINE_ONLY = (
    "chat_template",
    "documents",
    "add_special_tokens",
    "truncate_prompt_tokens",
)  # fields that only engines apply


class ChatTemplate:
    """A model's chat template, rendered by transformers in a sandbox with the arguments that vLLM 0.32 passes.

    Mirrors vllm/renderers/hf.py and chat_utils.py. A conversation with more than text, or one that the template
    refuses, has no text. A text that differs from the engine's costs cache hits in forecasts, and nothing else.
    """

    def __init__(self, template: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """Load a template, or several by name, and the special tokens; ImportError where a package is missing."""
        import jinja2  # noqa: F401 - or transformers would fail only at the first chat
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        no_words = Tokenizer(models.WordLevel({}, unk_token=""))  # only the template is used
        self._tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=no_words, chat_template=template, **special
        )
        self._own_arguments = frozenset(signature(self._tokenizer.apply_chat_template).parameters)

    def text_of(self, body: Mapping[str, Any]) -> str | None:
        """Write the conversation of a request's body; None where only the engine can."""
        if any(body.get(name) is not None for name in ENGINE_ONLY):
            return None
        arguments = body.get("chat_template_kwargs") or {}
        if not isinstance(arguments, Mapping) or self._own_arguments & arguments.keys():
            return None
        effort = body.get("reasoning_effort")
        if effort is not None:
            arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_message(one) for one in body["messages"]],
                    tools=[_tool(one) for one in body.get("tools") or ()] or None,
                    add_generation_prompt=body.get("add_generation_prompt", True),
                    continue_final_message=body.get("continue_final_message", False),
                    tokenize=False,
                    **arguments,
                )
            )
        except Exception:  # noqa: BLE001 - a template may raise anything; the engine reports it to the client
            return None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the fields of a message that templates read."""
    role, content = message["role"], message.get("content")
    fields: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else _text(content or ())}
    if role == "assistant":
        if message.get("tool_calls"):
            fields["tool_calls"] = [_call(one) for one in message["tool_calls"]]
        if message.get("reasoning") is not None:
            fields["reasoning"] = fields["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        fields["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        fields["name"] = message["name"]
    return fields


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    if any(part.get("type", "text") != "text" for part in parts):
        raise ValueError("content: contains more than text")
    return "\n".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments of a tool call."""
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the fields of a tool that vLLM keeps, in its order."""
    function = tool["function"]
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    return {"type": "function", "function": fields}


def template_beside(tokenizer_file: str, template_file: str = "") -> ChatTemplate | None:
    """Load the named chat template, else the one in the model's folder; ValueError where it cannot be read."""
    folder = Path(tokenizer_file).parent
    try:
        config = json.loads(_read(folder / CONFIG) or "{}")
        template = Path(template_file).read_text(encoding="utf-8") if template_file else _read(folder / TEMPLATE)
        found = template or _named(config.get("chat_template"))
        special = {name: _spelt(config[name]) for name in SPECIAL if config.get(name)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"chat_template: {template_file or folder} cannot be read: {error}") from None
    if not found:
        return None
    try:
        return ChatTemplate(found, special)
    except ImportError as error:
        if template_file:
            raise ValueError(f"chat_template: needs the package {error.name!r}, which is not installed") from None
        log_event(
            log, logging.WARNING, "chats have no KV block names", reason=f"the package {error.name!r} is not installed"
        )
        return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _named(template: Any) -> Any:
    """Return one template, or several by name."""
    return {one["name"]: one["template"] for one in template} if isinstance(template, list) else template


def _spelt(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])
