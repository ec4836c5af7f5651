"""Which requests have a grammar, and which of them share one."""

from __future__ import annotations

from typing import Any

import pytest

from services.http.structured_output import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_choice": ["yes", "no"]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}},
    ],
)
def test_requests_with_a_grammar(fields: dict[str, Any]) -> None:
    """Its name is short, the same whatever the order of fields, and differs where the grammar does."""
    name = grammar_of(fields)
    assert len(name) == 8
    assert grammar_of({"model": "tiny", **fields}) == name
    assert grammar_of({**fields, "guided_regex": "x"}) != name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": "json"},
        {"structured_outputs": {}},
        {"structured_outputs": {"disable_any_whitespace": True}},
        {"tools": [TOOL], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"text": "hello"},
    ],
)
def test_requests_without_a_grammar(fields: dict[str, Any]) -> None:
    """Free text, and fields that mean something else."""
    assert grammar_of(fields) == b""


def test_equal_schemas_are_one_grammar() -> None:
    """The order of keys does not matter."""
    one = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1, "b": 2}}}}
    other = {"response_format": {"json_schema": {"schema": {"b": 2, "a": 1}}, "type": "json_schema"}}
    assert grammar_of(one) == grammar_of(other)
