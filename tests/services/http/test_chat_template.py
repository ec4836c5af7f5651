"""Chat templates render conversations as vLLM does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.http.chat_template import ChatTemplate, template_beside

pytest.importorskip("transformers")

# Similar to Qwen's.
QWEN = """
{%- if tools %}{{- '# Tools' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.reasoning_content %}{{- message.reasoning_content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{- call.function.name + ' ' }}{{- call.function.arguments | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}{%- endif %}
"""
PLAIN = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "y", "name": "bob"},
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": "é", "a": 1}'}}
AGENT = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]},
    {"role": "assistant", "content": "z", "reasoning": "hm"},
]
TOOLS = [
    {"type": "function", "function": {"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}, "name": "f"}},
    {"type": "function", "function": {"description": "d", "name": "g", "strict": True}},
]
# Made by vLLM 0.32's own `parse_chat_messages`, `ChatCompletionRequest.build_chat_params` and the same template.
SYSTEM, TURN = "<|im_start|>system\nS<|im_end|>\n", "<|im_start|>assistant\n"
SAID = f"{SYSTEM}<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>user\ny<|im_end|>\n"
CASES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": PLAIN}, SAID + TURN),
    (
        {"messages": PLAIN + AGENT},
        SAID + '<|im_start|>assistant\nf {"b": "é", "a": 1}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n'
        "<|im_start|>assistant\nzhm<|im_end|>\n" + TURN,
    ),
    (
        {"messages": PLAIN[:1], "tools": TOOLS},
        '# Tools\n{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object", '
        '"properties": {"b": {}, "a": {}}}}}\n{"type": "function", "function": {"name": "g", "description": "d", '
        '"parameters": null, "strict": true}}\n' + SYSTEM + TURN,
    ),
    ({"messages": PLAIN[:1], "chat_template_kwargs": {"enable_thinking": False}}, SYSTEM + TURN + "<think></think>"),
    ({"messages": PLAIN[:1], "reasoning_effort": "none"}, SYSTEM + TURN + "<think></think>"),
    ({"messages": PLAIN[:1], "reasoning_effort": "low"}, SYSTEM + TURN),
    ({"messages": PLAIN[:1], "add_generation_prompt": False}, SYSTEM),
    (
        {"messages": [PLAIN[0], PLAIN[2]], "add_generation_prompt": False, "continue_final_message": True},
        SYSTEM + TURN + "x",
    ),
)


@pytest.mark.parametrize(("body", "text"), CASES)
def test_a_conversation_is_as_vllm_writes_it(body: dict[str, Any], text: str) -> None:
    """Parts are joined, arguments of calls parsed, tools in vLLM's order, and the request's own template arguments."""
    assert ChatTemplate(QWEN, {}).text_of(body) == text


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "x"}]},
        {"chat_template_kwargs": {"chat_template": "mine"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": 3},
        {"tools": 3},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"content": "nobody's"}]},
    ],
)
def test_conversations_that_only_the_engine_can_render(more: dict[str, Any]) -> None:
    """Images, a template of the client's own, invalid messages: no text, and no exception."""
    assert ChatTemplate(QWEN, {}).text_of({"messages": PLAIN, **more}) is None


def test_templates_are_found_in_the_model_folder(tmp_path: Path) -> None:
    """In a file of its own, in the tokenizer's settings, also several by name; or there is none."""
    file, body = str(tmp_path / "tokenizer.json"), {"messages": [{"role": "user", "content": "hi"}]}
    assert template_beside(file) is None
    config = tmp_path / "tokenizer_config.json"

    def text(**more: Any) -> str | None:
        found = template_beside(file)
        assert found is not None
        return found.text_of({**body, **more})

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert (text(), text(tools=TOOLS)) == ("plain", "with tools")
    config.write_text(json.dumps({"chat_template": "{{ eos_token }}", "eos_token": {"content": "</s>"}}))
    assert text() == "</s>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }} of a file")
    assert text() == "</s> of a file"
    config.write_text("[")
    with pytest.raises(ValueError, match="chat_template: .* cannot be read"):
        template_beside(file)
