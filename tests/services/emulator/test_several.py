"""Several responses and several prompts, as vLLM serves them, and the compilation of grammars."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from services.engine_state.identity import parts_of
from tests.services.emulator.running import Emulated, emulated, events

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine for all tests."""
    with emulated(tmp_path_factory.mktemp("several"), grammar_compile_s=40.0) as here:  # 0.2 s of the wall clock
        yield here


def test_several_responses_in_one_piece(engine: Emulated) -> None:
    """Each choice has an index and an answer of its own; the prompt counts once."""
    whole = engine.complete(n=3, max_tokens=7, seed=1)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in whole["choices"]}) == 3
    single = engine.complete(max_tokens=7, seed=1)
    assert whole["choices"][0]["text"] == single["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 21
    assert whole["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert whole["usage"]["total_tokens"] == 21 + single["usage"]["prompt_tokens"]


def test_several_prompts_in_one_piece(engine: Emulated) -> None:
    """Choices are ordered by prompt; each prompt counts."""
    whole = engine.complete(prompt=["Hello", "Good day to you"], n=2, max_tokens=3, seed=1)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    singles = [engine.complete(prompt=prompt, max_tokens=3, seed=1) for prompt in ("Hello", "Good day to you")]
    assert [whole["choices"][index]["text"] for index in (0, 2)] == [one["choices"][0]["text"] for one in singles]
    assert whole["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in singles)
    ids = engine.complete(prompt=[[1, 2, 3], [4, 5]], max_tokens=3)
    assert (len(ids["choices"]), ids["usage"]["prompt_tokens"]) == (2, 5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_interleave_responses(engine: Emulated, path: str) -> None:
    """Events of all choices come side by side; one usage and one end come last."""
    chat = "chat" in path
    body = {**(CHAT if chat else {"prompt": "Hello"}), "n": 3, "max_tokens": 20, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    engine.set_faults(slow=200.0)  # or several steps end at once
    *data, usage = events(engine.client.post(path, json=body).text)
    engine.set_faults()
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    order = []
    for event in data:
        (choice,) = event["choices"]
        text = choice["delta"].get("content", "") if chat else choice["text"]
        texts[choice["index"]] += text
        order += [choice["index"]] if text else []
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert order != sorted(order)
    whole = engine.client.post(path, json={**body, "stream": False, "stream_options": None}).json()
    found = [choice["message"]["content"] if chat else choice["text"] for choice in whole["choices"]]
    assert [texts[index] for index in range(3)] == found
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 60
    engine.until(engine.is_idle)


def test_the_engine_names_its_requests_as_vllm_does(engine: Emulated) -> None:
    """Client id, prompt and sequence can be read from them."""
    named = []
    add = engine.driver.submit

    def noting(*arguments: Any, **more: Any) -> Any:
        job = add(*arguments, **more)
        named.append(tuple(parts_of(job.engine_id)))
        return job

    engine.driver.submit = noting  # type: ignore[method-assign]
    try:
        headers = {"x-request-id": "client-1"}
        engine.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 1}, headers=headers)
        engine.client.post("/v1/chat/completions", json={**CHAT, "n": 2, "max_tokens": 1}, headers=headers)
        engine.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}, headers=headers)
    finally:
        engine.driver.submit = add  # type: ignore[method-assign]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1), (0, 0), (1, 0)]
    assert named == [("client-1", *place) for place in places]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"n": 0}, 400, "n must be at least 1, got 0."),
        ({"n": 16385}, 400, "n must be at most 16384, got 16385."),
        ({"n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling, got 2."),
        ({"prompt": []}, 400, "You must pass at least one prompt"),
        ({"prompt": ["a"] * 11_000}, 503, "The engine is currently busy"),
    ],
)
def test_refusals(engine: Emulated, fields: dict[str, Any], status: int, message: str) -> None:
    """One line, as vLLM has it."""
    reply = engine.client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2, **fields})
    assert (reply.status_code, message in reply.json()["error"]["message"]) == (status, True), reply.text


def test_a_client_that_leaves_ends_all_responses(engine: Emulated) -> None:
    """Nothing runs afterwards."""
    engine.set_faults(slow=1000.0)
    engine.request_and_disconnect(n=4, max_tokens=500)
    engine.set_faults()
    engine.until(lambda: engine.is_idle() and engine.driver.num_jobs == 0)


def test_a_new_grammar_is_compiled_first(tmp_path: Path) -> None:
    """The first request with a grammar waits; the next one with the same does not, and one with another does."""

    def seconds(**fields: Any) -> float:
        start_s = time.monotonic()
        here.complete(max_tokens=2, **fields)
        return time.monotonic() - start_s

    with emulated(tmp_path, grammar_compile_s=100.0) as here:  # half a second of the wall clock
        assert seconds(response_format=SCHEMA) >= 0.5
        assert seconds(response_format=SCHEMA) < 0.5
        assert seconds() < 0.5
        assert seconds(structured_outputs={"choice": ["yes", "no"]}) >= 0.5
