"""Structured outputs: which requests have their answers follow a grammar, and the name of that grammar.

vLLM compiles the grammar of such a request before it schedules it, and keeps compiled grammars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

NAME_BYTES = 8
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of vLLM's `structured_outputs`
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  # of vLLM before 0.12, and of other engines
FREE_TEXT = "text"


def grammar_of(data: Mapping[str, Any]) -> bytes:
    """Return the name of the grammar of a request's answer, the same for the same grammar; empty where it has none."""
    given = list(_grammars(data))
    if not given:
        return b""
    text = json.dumps(given, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=NAME_BYTES).digest()


def _grammars(data: Mapping[str, Any]) -> Iterator[Any]:
    form = data.get("response_format")
    text = data.get("text")
    if form is None and isinstance(text, dict):  # of OpenAI's responses
        form = text.get("format")
    if isinstance(form, dict) and form.get("type", FREE_TEXT) != FREE_TEXT:
        yield {name: value for name, value in form.items() if name not in ("name", "strict")}
    outputs = data.get("structured_outputs")
    if isinstance(outputs, dict):
        yield from ([name, outputs[name]] for name in CONSTRAINTS if outputs.get(name))
    yield from ([name, data[name]] for name in GUIDED if data.get(name))
    if data.get("tools") and _requires_tool(data.get("tool_choice")):
        yield [data["tools"], data["tool_choice"]]


def _requires_tool(choice: Any) -> bool:
    """Return whether an answer must call a tool, whose arguments vLLM then has follow a grammar."""
    return choice == "required" or isinstance(choice, dict)
