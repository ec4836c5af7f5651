"""Requests that the gateway refuses: bad input, missing keys, overload; the process stays up."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.block.v1 import common_pb2
from services.gateway.settings import GatewaySettings
from services.http.errors import ApiError
from services.http.limits import HttpLimits
from services.http.openai_body import read_body
from tests.services.gateway.stubs import COMPLETION, LOCAL, Call, completes, event, scene
from tests.services.gateway.test_failing import error_of
from tests.services.security.key_files import key
from tests.services.waiting import run

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

BAD_BODIES: list[tuple[str, Any, str | None]] = [
    (COMPLETIONS, b"", None),
    (COMPLETIONS, b"{", None),
    (COMPLETIONS, b"\xff\xfe{}", None),
    (COMPLETIONS, b"[" * 100_000, None),
    (COMPLETIONS, [1], None),
    (COMPLETIONS, "text", None),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "model": 3}, "model"),
    (COMPLETIONS, {"prompt": "x", "model": "m" * 300}, "model"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": NaN}', "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": -5}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "x", "ignore_eos": 1}, "ignore_eos"),
    (COMPLETIONS, {"prompt": "x", "priority": "high"}, "priority"),
    (COMPLETIONS, {"prompt": "x", "priority": 2**31}, "priority"),
    (COMPLETIONS, {"prompt": "x", "nvext": {"agent_hints": {"osl": -1}}}, "nvext.agent_hints.osl"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": [1]}, "vllm_xargs"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"block_ttft_s": 0}}, "vllm_xargs.block_ttft_s"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"block_tpot_s": 10**400}}, "vllm_xargs.block_tpot_s"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"block_class": "vip"}}, "vllm_xargs.block_class"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"block_weight": True}}, "vllm_xargs.block_weight"),
    (COMPLETIONS, {"prompt": "x", "vllm_xargs": {"block_client_id": "x" * 257}}, "vllm_xargs.block_client_id"),
    (CHAT, {"prompt": "x"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens"),
]


def test_bad_bodies() -> None:
    """Each error is a 400 that names the field, and no scheduler is called."""

    async def test() -> None:
        async with scene(completes) as here:
            for path, body, param in BAD_BODIES:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                response = await here.client.post(path, content=content, headers={"x-request-id": "bad"})
                assert response.status_code == 400, body
                error = error_of(response)
                assert (error["type"], error["param"]) == ("invalid_request_error", param), body
                assert response.headers["x-request-id"] == "bad"
            assert here.scheduler.asked == []
            assert (await here.post()).status_code == 200

    run(test)


BAD_HEADERS = (
    ("x-slo-ttft-ms", "soon"),
    ("x-slo-ttft-ms", "0"),
    ("x-slo-ttft-ms", "1e-322"),  # no seconds
    ("x-slo-tpot-ms", "nan"),
    ("x-llm-d-slo-ttft-ms", "-5"),
    ("x-block-priority", "1.5"),
    ("x-block-class", "vip"),
    ("x-block-weight", "0"),
    ("x-block-weight", "inf"),
    ("x-request-id", "a" * 300),
    ("x-session-id", "caf\u00e9"),
)


def test_bad_headers() -> None:
    """A bad header is refused by its name."""

    async def test() -> None:
        async with scene(completes) as here:
            for name, value in BAD_HEADERS:
                response = await here.post(headers={name: value.encode("latin-1")})
                assert (response.status_code, error_of(response)["param"]) == (400, name), value

    run(test)


def test_unknown_models_paths_and_methods() -> None:
    """A missing model or path is a 404, a wrong method a 405, in OpenAI's shape."""

    async def test() -> None:
        async with scene(completes, models=("tiny",)) as here:
            response = await here.post(model="huge")
            assert response.status_code == 404
            error = error_of(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "huge" in error["message"]
            assert (await here.post()).status_code == 200
            for path in ("/", "/v1/nowhere", "/sleep", "/v1/completions/", "/%00"):
                response = await here.client.post(path, json={})
                assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
            for method, path in (("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("POST", "/metrics")):
                response = await here.client.request(method, path)
                assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")

    run(test)


def test_bodies_have_a_limit() -> None:
    """A body that is too long is a 413, with a length in its head or without."""

    async def endless(num_pieces: int) -> Any:
        for _ in range(num_pieces):
            yield b"x" * 1000

    async def test() -> None:
        async with scene(completes, max_body_bytes=5000) as here:
            for content in (b"x" * 5001, endless(30)):
                response = await here.client.post(COMPLETIONS, content=content)
                assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
            assert (await here.post(prompt="x" * 4900)).status_code == 200

    run(test)


def test_requests_have_a_limit() -> None:
    """Beyond the limit of concurrent requests clients get a 429."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def waits(call: Call) -> None:
        asked.set()
        await go_on.wait()
        call.whole(COMPLETION)

    async def test() -> None:
        async with scene(waits, max_concurrency=1) as here:
            first = asyncio.create_task(here.post())
            await asked.wait()
            response = await here.post()
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert error_of(response)["code"] == "rate_limit_exceeded"
            go_on.set()
            assert (await first).status_code == 200
            assert (await here.post()).status_code == 200

    run(test)


def test_requests_count_while_their_bodies_arrive() -> None:
    """A slow upload counts as a concurrent request, until it ends or times out."""

    async def test() -> None:
        async with scene(completes, max_concurrency=1) as here:
            _, writer = await asyncio.open_connection(LOCAL, here.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            while await here.metric("block_gateway_requests_under_way") < 1:
                pass
            assert (await here.post()).status_code == 429
            writer.transport.abort()
            while (await here.post()).status_code == 429:
                pass
            assert len(here.scheduler.asked) == 1

    run(test)


def test_a_client_that_does_not_read_its_stream_is_left() -> None:
    """A stream that its client does not read is cancelled at the engine as well, and its reservation is released."""
    left = asyncio.Event()

    async def endless(call: Call) -> None:
        call.stream()
        try:
            while True:
                await call.chunk(event("x" * 5000))
        except ConnectionError:
            left.set()
            raise

    async def test() -> None:
        async with scene(endless, http=HttpLimits(slow_reader_s=0.2)) as here:
            with socket.socket() as reading:
                reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reading.connect((LOCAL, here.port))
                body = b'{"model": "tiny", "prompt": "Say hello", "stream": true}'
                reading.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
                )
                await left.wait()
                released = await here.scheduler.released.get()
            assert released.outcome.finish_reason == common_pb2.FINISH_REASON_CANCELLED
            assert await here.metric('block_http_refused_total{reason="slow_reader"}') == 1
            assert await here.metric("block_gateway_requests_under_way") == 0

    run(test)


JSON_REFUSED = (
    (b'{"prompt": "x", "tools": %s1%s}' % (b"[" * 70, b"]" * 70), "json_too_deep"),
    (b'{"prompt": "x", "kv_transfer_params": {}, "kv_transfer_params": null}', "duplicate_key"),
    (b'{"prompt": "x", "temperature": NaN}', "not_a_number"),
)


def test_json_that_engines_may_read_in_other_ways_is_refused() -> None:
    """Each has its own code and names the field; only a limit counts as one."""

    async def test() -> None:
        async with scene(completes) as here:
            for body, code in JSON_REFUSED:
                response = await here.client.post(COMPLETIONS, content=body)
                assert (response.status_code, error_of(response)["code"]) == (400, code)
                assert error_of(response)["param"]
            assert await here.metric('block_http_refused_total{reason="json_too_deep"}') == 1
            assert here.engines[0].calls == []

    run(test)


def test_every_reply_has_a_request_id() -> None:
    """The client's own is returned on every path; a missing or bad one is replaced."""

    async def test() -> None:
        async with scene(completes) as here:
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere", COMPLETIONS):
                response = await here.client.get(path, headers={"x-request-id": "mine"})
                assert response.headers.get_list("x-request-id") == ["mine"]
                assert len((await here.client.get(path)).headers["x-request-id"]) >= 16
            response = await here.post(headers={"x-request-id": "a" * 300})
            assert len(response.headers["x-request-id"]) == 32

    run(test)


def test_clients_without_a_key_are_refused() -> None:
    """With keys, only their holders are served; engines do not see the key, schedulers see the holder's name."""
    bad = ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer"})

    async def test() -> None:
        async with scene(completes, keys=(key("secret", "alice"), key("other", "bob", tenant="guests"))) as here:
            for headers in bad:
                response = await here.post(headers=headers)
                assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
            assert (await here.client.get("/v1/models")).status_code == 401
            assert (await here.client.get("/health")).status_code == 200
            assert (await here.post(headers={"authorization": "bearer secret"})).status_code == 200
            assert (await here.post(headers={"x-api-key": "other"})).status_code == 200
            assert [asked.request.client_id for asked in here.scheduler.asked] == ["alice", "guests"]
            for call in here.engines[0].calls:
                assert {"authorization", "x-api-key"}.isdisjoint(call.headers)

    run(test)


def test_garbage_on_the_wire() -> None:
    """Bytes that are not HTTP get a 400 and a closed connection; the next client is served."""

    async def test() -> None:
        async with scene(completes) as here:
            for garbage in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/completions HTTP/9.9\r\n\r\n"):
                reader, writer = await asyncio.open_connection(LOCAL, here.port)
                writer.write(garbage)
                assert b" 400 " in await reader.readline()
                writer.close()
                await writer.wait_closed()
            assert (await here.post()).status_code == 200

    run(test)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "max_tokens", "min_tokens", "ignore_eos", "stream", "priority", "nvext", "tools"]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=5), st.booleans())
def test_any_body_is_read_or_refused(data: dict[str, Any], chat: bool) -> None:
    """Any body is read, or refused by a ValueError."""
    try:
        ask = read_body(json.dumps(data).encode(), chat=chat)
    except ValueError as error:
        assert ApiError.of(error).status == 400
    else:
        assert ask.max_tokens is None or ask.max_tokens >= 0


BAD_SETTINGS = (
    ({"schedulers": ()}, "scheduler"),
    ({"schedulers": ("nowhere",)}, "scheduler"),
    ({"schedulers": ("host:0",)}, "scheduler"),
    ({"engine_urls": ("ftp://x",)}, "engine_url"),
    ({"engine_urls": ("http://u@x",)}, "engine_url"),
    ({"idle_s": 0.0}, "idle_s"),
    ({"connect_s": float("nan")}, "connect_s"),
    ({"attempts": 0}, "attempts"),
    ({"retry_ratio": -0.1}, "retry_ratio"),
    ({"bytes_per_token": 0.0}, "bytes_per_token"),
)


@pytest.mark.parametrize(("options", "field"), BAD_SETTINGS)
def test_bad_settings(options: dict[str, Any], field: str) -> None:
    """An impossible setting is refused by its name."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        GatewaySettings(**{"schedulers": ("a:1",), **options})
