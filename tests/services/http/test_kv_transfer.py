"""Bodies of prefill and decode legs, and replies between them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.kv_transfer import (
    KV_CONNECTORS,
    REMOTE_DECODE,
    PrefilledPrompt,
    decode_body,
    prefill_body,
    read_prefill_reply,
    require_kv_connector,
    with_cached_tokens,
)
from tests.services.kv_transfer_replies import held_params

NIXL, PUSH, STORAGE = (KV_CONNECTORS[name] for name in ("nixl", "nixl-push", "shared-storage"))
PARAMS = held_params(1)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(st.sampled_from(["prompt", "stream", "max_tokens", "kv_transfer_params", "tools"]), values)


def written(data: object) -> bytes:
    """Write JSON as clients do."""
    return json.dumps(data).encode()


@given(fields, st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_a_decode_leg_is_the_original_and_the_reply(body: dict[str, Any], params: dict[str, Any]) -> None:
    """Nothing else changes, whatever the body contains."""
    body = {"model": "m", **body}
    sent = decode_body(written(body), PrefilledPrompt(params=written(params)))
    assert json.loads(sent) == {**body, "kv_transfer_params": params}
    assert sent.count(b'"kv_transfer_params"') == written({**body, "kv_transfer_params": params}).count(
        b'"kv_transfer_params"'
    )


def test_a_decode_leg_without_names_is_the_original() -> None:
    """Byte for byte."""
    body = b'{ "prompt" : "x" }'
    assert decode_body(body, PrefilledPrompt()) is body


@given(fields)
def test_a_prefill_leg_produces_one_token(body: dict[str, Any]) -> None:
    """It is not streamed, has no lower limit, and asks for KV blocks where the connector names them."""
    body |= {"min_tokens": 4, "stream_options": {"include_usage": True}, "max_completion_tokens": 8}
    for connector in (NIXL, PUSH, STORAGE):
        sent = json.loads(prefill_body(written(body), connector))
        assert (sent.pop("stream"), sent.pop("max_tokens"), sent.pop("max_completion_tokens")) == (False, 1, 1)
        assert sent.pop("kv_transfer_params", None) == (None if connector is STORAGE else REMOTE_DECODE)
        assert sent == {name: value for name, value in body.items() if name in ("prompt", "tools")}


def test_the_reply_to_a_prefill_leg() -> None:
    """What it names is kept unchanged, with the prefix hits."""
    params = {**PARAMS, "remote_prefill_cached_tokens": 3, "later": {"x": [1.5, None]}}
    prompt = read_prefill_reply(written({"kv_transfer_params": params}), NIXL)
    assert prompt is not None
    assert json.loads(prompt.params or b"") == params
    assert prompt.cached_tokens == 3


def test_prefix_hits_in_the_usage_of_a_prefill_leg() -> None:
    """They are read where the names have none."""
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}}
    prompt = read_prefill_reply(written({"kv_transfer_params": PARAMS, "usage": usage}), NIXL)
    assert (prompt and prompt.cached_tokens) == 2
    assert read_prefill_reply(written({"usage": usage}), STORAGE) == PrefilledPrompt(cached_tokens=2)
    assert read_prefill_reply(written({"usage": None}), STORAGE) == PrefilledPrompt()


@pytest.mark.parametrize(
    "reply", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_block_ids": [[]]}}]
)
def test_a_prefill_leg_that_held_nothing(reply: dict[str, Any]) -> None:
    """There is nothing to fetch."""
    assert read_prefill_reply(written(reply), NIXL) is None


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"remote_block_ids": None}, "remote_block_ids: is not a list of lists"),
        ({"remote_block_ids": [1]}, "remote_block_ids: is not a list of lists"),
        ({"remote_engine_id": None}, "remote_engine_id: is missing"),
        ({"remote_request_id": 7}, "remote_request_id: is missing"),
        ({"remote_host": ""}, "remote_host: is missing"),
        ({"remote_port": None}, "remote_port: is missing"),
        ({"do_remote_prefill": None}, "do_remote_prefill: is not true"),
        ({"transfer_mode": "push"}, "transfer_mode: is 'push', not 'pull'"),
    ],
)
def test_replies_that_no_decode_leg_can_use(changes: dict[str, Any], error: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=error):
        read_prefill_reply(written({"kv_transfer_params": {**PARAMS, **changes}}), NIXL)


def test_a_push_connector_names_its_mode() -> None:
    """Of an older engine, the mode is not known."""
    assert read_prefill_reply(written({"kv_transfer_params": {**PARAMS, "transfer_mode": "push"}}), PUSH)
    unknown = {name: value for name, value in PARAMS.items() if name != "transfer_mode"}
    assert read_prefill_reply(written({"kv_transfer_params": unknown}), PUSH)


@pytest.mark.parametrize("reply", [b"", b"[", b"\xff", b"[1]", b"null"])
def test_replies_that_are_no_objects(reply: bytes) -> None:
    """They are refused."""
    with pytest.raises(ValueError, match="the reply is not"):
        read_prefill_reply(reply, NIXL)


def test_prefix_hits_are_replaced_in_the_usage_only() -> None:
    """Texts that look like it stay as they are."""
    text = json.dumps({"prompt_tokens_details": {"cached_tokens": 9}})
    reply = {
        "choices": [{"text": text}],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": 8}},
    }
    corrected = json.loads(with_cached_tokens(written(reply), 2))
    reply["usage"]["prompt_tokens_details"]["cached_tokens"] = 2
    assert corrected == reply
    assert with_cached_tokens(b"data: {}\n\n", 2) == b"data: {}\n\n"


def test_an_unknown_connector() -> None:
    """The error names those that are known."""
    with pytest.raises(ValueError, match="kv_connector: must be one of nixl, nixl-push, shared-storage"):
        require_kv_connector("mooncake")
