"""Conversations as text, as engines write them before they cut them into tokens."""

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
NEVER_WITH = ("chat_template", "documents", "add_special_tokens", "truncate_prompt_tokens")  # of a body: ask the engine


class ChatTemplate:
    """A model's chat template, rendered by transformers in a sandbox, given what vLLM 0.32 gives it.

    vllm/renderers/hf.py and chat_utils.py. Of a conversation with more than text in it, or that the template refuses,
    it gives nothing. A text that is not quite the engine's costs cache hits in forecasts, and nothing else.
    """

    def __init__(self, template: str | Mapping[str, str], special: Mapping[str, str]) -> None:
        """Take a template, or several by name, and special tokens' names; ImportError where a package is missing."""
        import jinja2  # noqa: F401 - which transformers would miss only when the first chat comes
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        nobody = Tokenizer(models.WordLevel({}, unk_token=""))  # the text is cut into tokens elsewhere
        self._tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=nobody, chat_template=template, **special
        )
        self._arguments = frozenset(signature(self._tokenizer.apply_chat_template).parameters)

    def text_of(self, asked: Mapping[str, Any]) -> str | None:
        """Write down the conversation of a request's body; None where only the engine can."""
        if any(asked.get(name) is not None for name in NEVER_WITH):
            return None
        given = asked.get("chat_template_kwargs") or {}
        if not isinstance(given, Mapping) or self._arguments & given.keys():
            return None
        effort = asked.get("reasoning_effort")
        if effort is not None:
            given = {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_message(one) for one in asked["messages"]],
                    tools=[_tool(one) for one in asked.get("tools") or ()] or None,
                    add_generation_prompt=asked.get("add_generation_prompt", True),
                    continue_final_message=asked.get("continue_final_message", False),
                    tokenize=False,
                    **given,
                )
            )
        except Exception:  # noqa: BLE001 - a template raises what it likes, and the engine tells the client
            return None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Take what templates see of a message."""
    role, content = message["role"], message.get("content")
    told: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else _text(content or ())}
    if role == "assistant":
        if message.get("tool_calls"):
            told["tool_calls"] = [_call(one) for one in message["tool_calls"]]
        if message.get("reasoning") is not None:
            told["reasoning"] = told["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        told["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        told["name"] = message["name"]
    return told


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    if any(part.get("type", "text") != "text" for part in parts):
        raise ValueError("content: is more than text")
    return "\n".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Take a call of a tool, with arguments read."""
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Take a tool with the fields that the engine knows, in the order in which it writes them."""
    function = tool["function"]
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        told["strict"] = function["strict"]
    return {"type": "function", "function": told}


def template_beside(tokenizer_file: str, template_file: str = "") -> ChatTemplate | None:
    """Find the chat template of a model's folder, or take the one that is named; ValueError where that cannot be."""
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
            log, logging.WARNING, "chats get no token blocks", reason=f"the package {error.name!r} is not installed"
        )
        return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _named(template: Any) -> Any:
    """Read one template, or a list of several with their names."""
    return {one["name"]: one["template"] for one in template} if isinstance(template, list) else template


def _spelt(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])
