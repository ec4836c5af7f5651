"""The HTTP surface: the replies of vLLM 0.32, field for field."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from services.emulator.tokens import token_ids
from tests.services.emulator.running import MODEL, Emulated, events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": MODEL, "prompt": "Hello there, how are you", "max_tokens": 4, "ignore_eos": True}
MESSAGES = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}

# as a real vLLM wrote them
COMPLETION_KEYS = (
    "id object created model choices service_tier system_fingerprint usage kv_transfer_params ec_transfer_params "
    "metrics"
)
COMPLETION_CHOICE = (
    "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts"
)
CHAT_KEYS = (
    "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
    "prompt_text kv_transfer_params ec_transfer_params metrics"
)
CHAT_CHOICE = "index message logprobs finish_reason stop_reason token_ids routed_experts"
EVENT_KEYS = "id object created model choices"
USAGE_KEYS = "prompt_tokens total_tokens completion_tokens prompt_tokens_details completion_tokens_details"


def test_small_paths(engine: Emulated) -> None:
    """Health is an empty 200, and the others reply as vLLM's."""
    health = engine.client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert engine.client.get("/ping").status_code == 200
    assert engine.client.get("/version").json()["version"].startswith("0.32.0")
    assert engine.client.get("/load").json() == {"server_load": 0}
    (card,) = engine.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1024)
    assert engine.client.head("/health").status_code == 200
    missing = engine.client.get("/nope")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    wrong = engine.client.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_a_whole_completion(engine: Emulated) -> None:
    """Fields, their order, usage and the end are vLLM's."""
    answer = engine.client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "mine"})
    body = answer.json()
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert " ".join(body) == COMPLETION_KEYS
    assert " ".join(body["choices"][0]) == COMPLETION_CHOICE
    assert " ".join(body["usage"]) == USAGE_KEYS
    assert (body["id"], body["object"], body["model"]) == ("cmpl-mine", "text_completion", MODEL)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["text"].split())) == ("length", None, 4)
    num_prompt = len(token_ids(PROMPT["prompt"]))  # type: ignore[arg-type]
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (4, num_prompt + 4)


def test_a_whole_chat(engine: Emulated) -> None:
    """A chat's reply has a message; a missing id is generated."""
    body = engine.client.post(CHAT, json=MESSAGES).json()
    assert " ".join(body) == CHAT_KEYS
    assert " ".join(body["choices"][0]) == CHAT_CHOICE
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    message = body["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert len(message["content"].split()) == 4


def test_a_completions_stream(engine: Emulated) -> None:
    """One event a token, the bytes of vLLM's, and together the text of the whole."""
    whole = engine.client.post(COMPLETIONS, json=PROMPT).json()
    answer = engine.client.post(COMPLETIONS, json={**PROMPT, "stream": True}, headers={"x-request-id": "s"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    stream = events(answer.text)
    first = stream[0]["choices"][0]["text"]
    head = f'{{"id":"cmpl-s","object":"text_completion","created":{stream[0]["created"]},"model":"tiny","choices":['
    assert answer.text.startswith(
        f'data: {head}{{"index":0,"text":"{first}","logprobs":null,"finish_reason":null,"stop_reason":null,'
        f'"prompt_token_ids":null,"token_ids":null}}]}}\n\ndata: {head}'
    )
    assert answer.text.endswith(
        '"logprobs":null,"finish_reason":"length","stop_reason":null,"prompt_token_ids":null,"token_ids":null}],'
        '"system_fingerprint":"block-emulator"}\n\ndata: [DONE]\n\n'
    )
    assert len(stream) == 4
    assert "".join(event["choices"][0]["text"] for event in stream) == whole["choices"][0]["text"]


def test_a_chats_stream(engine: Emulated) -> None:
    """A role first, then one event a token."""
    whole = engine.client.post(CHAT, json=MESSAGES).json()
    text = engine.client.post(CHAT, json={**MESSAGES, "stream": True}).text
    role, *tokens = events(text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        in (text.split("\n\n")[0])
    )
    assert " ".join(role) == EVENT_KEYS + " prompt_token_ids prompt_text"
    assert {event["object"] for event in tokens} == {"chat.completion.chunk"}
    assert " ".join(tokens[0]["choices"][0]) == "index delta logprobs finish_reason token_ids"
    assert " ".join(tokens[-1]["choices"][0]) == "index delta logprobs finish_reason stop_reason token_ids"
    assert [event["choices"][0]["finish_reason"] for event in tokens] == [None, None, None, "length"]
    content = "".join(event["choices"][0]["delta"]["content"] for event in tokens)
    assert content == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)])
def test_usage_in_a_stream(engine: Emulated, path: str, body: dict[str, Any]) -> None:
    """Usage is an event of its own at the end, and part of every event on request."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *tokens, usage = events(engine.client.post(path, json=asked).text)
    assert all("usage" not in event for event in tokens)
    assert " ".join(usage) == EVENT_KEYS + " usage system_fingerprint"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    assert "cached_tokens" in usage["usage"]["prompt_tokens_details"]
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *tokens, _ = events(engine.client.post(path, json=asked).text)
    counts = [event["usage"]["completion_tokens"] for event in tokens]
    assert counts == ([0] if path == CHAT else []) + [1, 2, 3, 4]


def test_a_repeated_prompt_is_cached(engine: Emulated) -> None:
    """Prefix hits are full blocks of the same tokens, never the last token."""
    ids = list(range(900, 964))
    first, second = (engine.complete(prompt=ids, max_tokens=2)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 48


def test_the_next_turn_of_a_chat_is_cached_with_its_answer(engine: Emulated) -> None:
    """An answer that is part of the next prompt has the same tokens."""
    question = {"role": "user", "content": "tell me " + "more " * 30}
    body = {"messages": [question], "max_tokens": 64, "ignore_eos": True}
    first = engine.client.post(CHAT, json=body).json()
    turns = [question, first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = engine.client.post(CHAT, json={**body, "messages": turns}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] < cached
    assert cached == (first["usage"]["total_tokens"] - 1) // 16 * 16


def test_token_ids_and_texts_are_the_same_prompt(engine: Emulated) -> None:
    """/tokenize returns the tokens of a text, and both get the same answer."""
    told = engine.client.post("/tokenize", json={"prompt": PROMPT["prompt"], "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"])
    assert "".join(told["token_strs"]) == PROMPT["prompt"]
    assert told["max_model_len"] == 1024
    by_text, by_ids = (engine.complete(prompt=prompt, max_tokens=5) for prompt in (PROMPT["prompt"], told["tokens"]))
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["usage"]["prompt_tokens"] == told["count"]
    chat = engine.client.post("/tokenize", json={"messages": MESSAGES["messages"]}).json()
    assert chat["count"] == engine.client.post(CHAT, json=MESSAGES).json()["usage"]["prompt_tokens"]
    again = engine.client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert again == {"prompt": PROMPT["prompt"]}


@pytest.mark.parametrize(
    ("fields", "header", "num_tokens", "reason"),
    [
        ({"max_tokens": 7, "ignore_eos": True}, None, 7, "length"),
        ({"max_tokens": 50}, "5", 5, "stop"),
        ({"max_tokens": 3}, "5", 3, "length"),
        ({"max_tokens": 9, "ignore_eos": True}, "5", 9, "length"),
        ({"max_tokens": 50, "min_tokens": 8}, "5", 8, "stop"),
        ({}, "25", 25, "stop"),
        ({"ignore_eos": True}, None, 16, "length"),
        ({"max_tokens": None, "ignore_eos": True}, None, 16, "length"),
        ({"max_tokens": "6", "ignore_eos": True}, None, 6, "length"),
    ],
)
def test_lengths(engine: Emulated, fields: dict[str, Any], header: str | None, num_tokens: int, reason: str) -> None:
    """An answer is as long as its request says."""
    headers = {} if header is None else {"x-block-output-tokens": header}
    body = engine.client.post(COMPLETIONS, json={"prompt": "Hello", **fields}, headers=headers).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (num_tokens, reason)


def test_a_chat_may_fill_the_context(engine: Emulated) -> None:
    """Without a limit a chat ends at the model's length; `max_completion_tokens` is a limit."""
    body = {"messages": MESSAGES["messages"], "ignore_eos": True}
    usage = engine.client.post(CHAT, json=body).json()["usage"]
    assert usage["total_tokens"] == 1024
    usage = engine.client.post(CHAT, json={**body, "max_completion_tokens": 3, "max_tokens": 9}).json()["usage"]
    assert usage["completion_tokens"] == 3


def test_stop_strings(engine: Emulated) -> None:
    """The first stop string ends the answer within its token, and is part of the text only on request."""
    body = {**PROMPT, "max_tokens": 40}
    text = engine.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    stop = text[21:24]
    at = text.find(stop)
    choice = engine.client.post(COMPLETIONS, json={**body, "stop": ["never there", stop]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:at], "stop", stop)
    asked = {**body, "stop": stop, "include_stop_str_in_output": True, "stream": True}
    stream = events(engine.client.post(COMPLETIONS, json=asked).text)
    assert "".join(event["choices"][0]["text"] for event in stream) == text[: at + 3]
    assert stream[-1]["choices"][0]["stop_reason"] == stop
    asked = {**body, "stop": stop, "min_tokens": 20}
    later = engine.client.post(COMPLETIONS, json=asked).json()
    assert later["usage"]["completion_tokens"] > 20 or later["choices"][0]["finish_reason"] == "length"


BAD = "BadRequestError"
TOO_LONG = "This model's maximum context length is 1024 tokens. However, your prompt contains 1500 input tokens"


@pytest.mark.parametrize(
    ("path", "change", "status", "kind", "param", "message"),
    [
        (COMPLETIONS, {"model": "nope"}, 404, "NotFoundError", "model", "The model `nope` does not exist."),
        (COMPLETIONS, {"max_tokens": -1}, 400, BAD, "max_tokens", "max_tokens must be at least 1, got -1."),
        (COMPLETIONS, {"max_tokens": 0}, 400, BAD, "max_tokens", "max_tokens must be at least 1, got 0."),
        (CHAT, {"max_tokens": -1}, 400, BAD, "max_tokens", "max_tokens must be at least 1, got -1."),
        (COMPLETIONS, {"max_tokens": 9999}, 400, BAD, "max_tokens", "max_tokens=9999 cannot be greater than"),
        (COMPLETIONS, {"max_tokens": "x"}, 400, "Bad Request", "body.max_tokens", "'type': 'int_parsing'"),
        (COMPLETIONS, {"max_tokens": 3.5}, 400, "Bad Request", "body.max_tokens", "int_from_float"),
        (COMPLETIONS, {"prompt": [7] * 1500}, 400, BAD, "input_tokens", TOO_LONG),
        (COMPLETIONS, {"prompt": [7] * 1024}, 400, BAD, "max_tokens", "max_tokens must be at least 1, got 0."),
        (COMPLETIONS, {"prompt": None}, 400, BAD, "prompt", "Either prompt or prompt_embeds must be provided"),
        (COMPLETIONS, {"prompt": ""}, 400, BAD, "prompt", "Either prompt or prompt_embeds must be provided"),
        (COMPLETIONS, {"prompt": []}, 400, BAD, None, "You must pass at least one prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "Bad Request", "body.prompt.1", "valid integer"),
        (COMPLETIONS, {"prompt": [1, -4]}, 400, "Bad Request", "body.prompt.1", "valid integer"),
        (COMPLETIONS, {"prompt": [2**40]}, 400, BAD, None, "out of vocabulary"),
        (COMPLETIONS, {"prompt": 5}, 400, "Bad Request", "body.prompt", "valid string"),
        (COMPLETIONS, {"stream": "maybe"}, 400, "Bad Request", "body.stream", "bool_parsing"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, BAD, "stream_options", "`stream=True`"),
        (COMPLETIONS, {"priority": "x"}, 400, "Bad Request", "body.priority", "int_parsing"),
        (COMPLETIONS, {"stop": 5}, 400, "Bad Request", "body.stop", "2 validation errors"),
        (COMPLETIONS, {"stop": [""]}, 400, BAD, None, "stop cannot contain an empty string."),
        (COMPLETIONS, {"temperature": -1}, 400, BAD, "temperature", "temperature must be non-negative"),
        (COMPLETIONS, {"n": 0}, 400, BAD, None, "n must be at least 1, got 0."),
        (COMPLETIONS, {"echo": True}, 400, BAD, "echo", "not emulated"),
        (COMPLETIONS, {"min_tokens": 9}, 400, BAD, None, "min_tokens must be less than or equal to max_tokens=4"),
        (COMPLETIONS, {"vllm_xargs": {"block_tag_tokens": "x"}}, 400, BAD, "vllm_xargs", "must be a number"),
        (CHAT, {"messages": []}, 400, BAD, None, "Cannot apply chat template to an empty conversation."),
        (CHAT, {"messages": None}, 400, "Bad Request", "body.messages", "list_type"),
        (CHAT, {"messages": ["x"]}, 400, "Bad Request", "body.messages.0", "dict_type"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "Bad Request", "body.messages.0.role", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "Bad Request", "body.messages.0.content", "string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, BAD, None, "type text"),
    ],
)  # fmt: skip
def test_refusals(
    engine: Emulated, path: str, change: dict[str, Any], status: int, kind: str, param: str | None, message: str
) -> None:
    """Refusals of vLLM have vLLM's messages; features that are not emulated are refused too."""
    answer = engine.client.post(path, json={**(PROMPT if path == COMPLETIONS else MESSAGES), **change})
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
    assert message in error["message"]
    if param is not None:
        assert error["param"] == param
    assert engine.client.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b'{"model": ', "application/json", "'loc': 'body.10', 'msg': 'JSON decode error'"),
        (b"[1]", "application/json", "Input should be a valid dictionary"),
        (b"", "application/json", "Field required"),
        (b"\xff\xfe", "application/json; charset=utf-8", "JSON decode error"),
        (b"[" * 100_000, "application/json", "JSON decode error"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "application/json", "JSON decode error"),
        (json.dumps(PROMPT).encode(), "text/plain", "Only 'application/json' is allowed"),
    ],
)
def test_malformed_bodies(engine: Emulated, content: bytes, kind: str, message: str) -> None:
    """Malformed bodies are refused with a 400 that names the place."""
    answer = engine.client.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", ["0", "-3", "x", "1.5", "", "9" * 40, "\u0661"])
def test_a_bad_length_is_refused(engine: Emulated, value: str) -> None:
    """The header must be a whole number of tokens."""
    headers = [(b"x-block-output-tokens", value.encode())]
    answer = engine.client.post(COMPLETIONS, json=PROMPT, headers=headers)
    assert answer.status_code == 400
    assert "x-block-output-tokens" in answer.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream", "stream_options",
    "ignore_eos", "min_tokens", "priority", "seed", "temperature", "vllm_xargs", "echo",
]  # fmt: skip


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/admin/fault"]),
    change=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
def test_any_request_is_answered_or_refused(engine: Emulated, path: str, change: dict[str, Any]) -> None:
    """No body causes an error of the server."""
    body = {"prompt": "x", "messages": MESSAGES["messages"], "max_tokens": 2, **change}
    content = json.dumps(body).encode()
    answer = engine.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)


def test_metrics_have_vllms_names(engine: Emulated) -> None:
    """Prometheus can parse them, and they count requests and tokens."""
    before = engine.metric("vllm:generation_tokens_total")
    engine.complete(max_tokens=25)
    assert engine.metric("vllm:generation_tokens_total") == before + 25
    families = {family.name: family for family in text_string_to_metric_families(engine.client.get("/metrics").text)}
    assert families.keys() >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
        "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:prompt_tokens",
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_inference_time_seconds", "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds", "vllm:generation_tokens", "vllm:request_success",
        "vllm:iteration_tokens_total",
    }  # fmt: skip
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels["num_gpu_blocks"], info.labels["block_size"]) == ("257", "16")
    (count,) = [
        sample.value
        for sample in families["vllm:e2e_request_latency_seconds"].samples
        if sample.name.endswith("_count")
    ]
    ended = {sample.labels.get("finished_reason"): sample.value for sample in families["vllm:request_success"].samples
             if sample.name.endswith("_total")}  # fmt: skip
    assert count == sum(ended.values())
    bounds = [
        float(sample.labels["le"])
        for sample in families["vllm:request_prompt_tokens"].samples
        if sample.name.endswith("_bucket")
    ]
    assert bounds[:4] == [1, 2, 5, 10]


def test_metrics_count_attained_targets(engine: Emulated) -> None:
    """Requests with targets count by class and priority, in wall time; the others do not."""

    def values(name: str) -> float:
        labels = 'class="best-effort",priority="7"'
        target = "deadlines" if name.startswith("targets") else None
        found = re.search(
            rf"^block_emulator_{name}_total\{{{labels}{f',target=.{target}.' if target else ''}\}} (\S+)$",
            engine.plain_metrics(), re.MULTILINE,
        )  # fmt: skip
        return float(found[1]) if found else 0.0

    names = ("tokens_due", "tokens_on_time", "possible_gain", "gain", "targets", "targets_attained")
    facts = {"block_class": "best-effort", "block_weight": 0.5}
    assert [values(name) for name in names] == [0.0] * 6
    engine.complete(max_tokens=5, priority=7, vllm_xargs={**facts, "block_ttft_s": 600.0, "block_tpot_s": 600.0})
    assert [values(name) for name in names] == [5, 5, 2.5, 2.5, 1, 1]
    engine.complete(max_tokens=5, priority=7, vllm_xargs={**facts, "block_ttft_s": 1e-9, "block_tpot_s": 1e-9})
    assert [values(name) for name in names] == [10, 5, 5.0, 2.5, 2, 1]
    engine.complete(max_tokens=5, priority=7, vllm_xargs=facts)
    assert [values(name) for name in names] == [10, 5, 5.0, 2.5, 2, 1]
