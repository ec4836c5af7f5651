"""What passes through the gateway: bytes, headers, statuses, and the facts that schedulers receive."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from predictor.media_tokens import ESTIMATED_IMAGE_TOKENS
from protos.block.v1 import common_pb2
from services.gateway.server import listening
from services.http.json_body import request_json
from tests.services.gateway.stubs import COMPLETION, DONE, LOCAL, STREAM, Call, completes, event, scene, streams
from tests.services.security.key_files import key
from tests.services.waiting import LIMIT_S, run

PATHS = ("/v1/completions", "/v1/chat/completions")
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP

# Unusual streams, which must pass unchanged.
ODD_STREAMS = (
    b"".join(STREAM),
    b': a comment\n\ndata:{"choices":[]}\n\nevent: x\nid: 7\ndata: a\ndata: b\n\n' + DONE,
    event("\u00fc\U0001f600 data: not an event \\n\\n").replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n",
    b"data: no end",
    b"\n\n\n\n",
    event("x" * 300_000) + DONE,
)


@pytest.mark.parametrize("stream", ODD_STREAMS, ids=range(len(ODD_STREAMS)))
def test_streams_pass_byte_for_byte(stream: bytes) -> None:
    """However an engine cuts its stream into chunks, the client reads the same bytes."""

    async def answer(call: Call) -> None:
        size = max(json.loads(call.body)["size"], len(stream) // 500)
        call.stream()
        for start in range(0, len(stream), size):
            await call.chunk(stream[start : start + size])
        call.end()

    async def test() -> None:
        async with scene(answer) as here:
            for size in (1, 7, 100_000):
                response = await here.post(stream=True, size=size)
                assert response.content == stream
                assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

    run(test)


def test_each_event_passes_at_once() -> None:
    """An event reaches the client before the engine sends the next one; half an event waits for the rest."""
    go_on = asyncio.Event()

    async def answer(call: Call) -> None:
        call.stream()
        for piece in STREAM:
            await call.chunk(piece[:10])
            await call.chunk(piece[10:])
            await go_on.wait()
            go_on.clear()
        call.end()

    async def test() -> None:
        async with scene(answer) as here, here.client.stream("POST", PATHS[0], json=stream_request()) as response:
            pieces = response.aiter_raw()
            for piece in STREAM:
                assert await anext(pieces) == piece
                go_on.set()

    run(test)


def stream_request(**fields: Any) -> dict[str, Any]:
    """The body of a request for a stream."""
    return {"model": "tiny", "prompt": "Say hello", "stream": True, **fields}


@pytest.mark.parametrize("path", PATHS)
def test_the_engine_gets_what_the_client_sent(path: str) -> None:
    """Body, path, query and headers pass; headers of one connection do not."""
    body = b'{ "model":"tiny" ,"prompt":"caf\xc3\xa9 \\u00e9", "messages":[{"role":"user","content":"hi"}],"x":1e2}  '
    sent = {
        "content-type": "application/json",
        "authorization": "Bearer for-the-engine",
        "x-block-output-tokens": "12",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    dropped = {"connection": "keep-alive, x-hop", "x-hop": "1", "accept-encoding": "gzip", "te": "trailers"}

    async def test() -> None:
        async with scene(completes) as here:
            headers = {**sent, **dropped, "x-request-id": "mine"}
            await here.client.post(f"{path}?a=1&b=%20", content=body, headers=headers)
            (call,) = here.engines[0].calls
            assert (call.target, call.body) == (f"{path}?a=1&b=%20", body)
            assert {name: call.headers.get(name) for name in sent} == sent
            assert call.headers["x-request-id"] == "mine"
            assert call.headers["host"] == f"{LOCAL}:{here.engines[0].port}"
            assert not {"x-hop", "accept-encoding", "te", "connection"} & set(call.headers)

    run(test)


@pytest.mark.parametrize("given", ["header", "hint", "both", "none", "zero"])
def test_engine_and_schedulers_get_the_same_priority(given: str) -> None:
    """A priority from a header is added to the body, where engines read it; the rest is unchanged."""
    fields = {
        "header": '"prompt":"x"',
        "hint": '"prompt":"x","nvext":{"agent_hints":{"priority":5}}',
        "both": '"priority":-5,"prompt":"{"',
        "none": '"prompt":"x","priority":0',
        "zero": '"prompt":"x","priority":0',
    }[given]
    headers = {"x-block-priority": "-5"} if given in ("header", "zero") else {}
    added = '"priority":-5,' if given in ("header", "hint") else ""

    async def test() -> None:
        async with scene(completes) as here:
            body = f' {{{fields} , "x":1e2}}'
            await here.client.post(PATHS[0], content=body.encode(), headers=headers)
            passed = here.engines[0].calls[0].body.decode()
            assert passed == f' {{{added}{fields} , "x":1e2}}'
            assert json.loads(passed).get("priority", 0) == here.scheduler.asked[0].request.priority

    run(test)


def test_no_field_is_there_twice() -> None:
    """What the gateway sets replaces a null or false of the client's."""

    async def test() -> None:
        async with scene(streams) as here:
            sent = {"priority": None, "vllm_xargs": None, "return_token_ids": False, "stream": True, "top_k": 1}
            await here.post(headers={"x-block-priority": "-5", "x-block-weight": "2"}, **sent)
            assert request_json(here.engines[0].calls[0].body) == {
                "model": "tiny", "prompt": "Say hello", "stream": True, "top_k": 1, "priority": -5,
                "vllm_xargs": {"block_weight": 2}, "return_token_ids": True,
            }  # fmt: skip

    run(test)


XARGS = (
    ({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "40"}, None, {"block_ttft_s": 0.25, "block_tpot_s": 0.04}),
    (
        {"x-block-class": "best-effort", "x-block-weight": "2.5"},
        None,
        {"block_class": "best-effort", "block_weight": 2.5},
    ),
    (
        {"x-session-id": "s", "x-llm-d-inference-fairness-id": "t"},
        None,
        {"block_session_id": "s", "block_client_id": "t"},
    ),
    ({"x-session-id": "s"}, {}, {"block_session_id": "s"}),
    (
        {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "40", "x-block-weight": "2"},
        {"block_ttft_s": 1.5, "block_weight": 3, "other": "caf\u00e9"},
        {"block_ttft_s": 1.5, "block_tpot_s": 0.04, "block_weight": 3, "other": "caf\u00e9"},
    ),
    (
        {"x-block-class": "real-time", "x-session-id": "s", "x-llm-d-inference-fairness-id": "t"},
        {"block_class": "best-effort", "block_session_id": "mine", "block_client_id": "me"},
        {"block_class": "best-effort", "block_session_id": "mine", "block_client_id": "me"},
    ),
    ({}, {"other": 1}, {"other": 1}),
)


@pytest.mark.parametrize(("headers", "own", "passed"), XARGS)
def test_facts_reach_engine_and_scheduler(
    headers: dict[str, str], own: dict[str, Any] | None, passed: dict[str, Any]
) -> None:
    """Facts from headers are added to `vllm_xargs`; what the client set there has precedence, for schedulers too."""
    fields = {} if own is None else {"vllm_xargs": own}

    async def test() -> None:
        async with scene(completes) as here:
            await here.post(headers={**headers, "x-block-priority": "4"}, **fields)
            body = json.loads(here.engines[0].calls[0].body)
            assert (body.pop("vllm_xargs"), body.pop("priority")) == (passed, 4)
            assert body == {"model": "tiny", "prompt": "Say hello"} | {k: v for k, v in body.items() if k == "stream"}
            asked = here.scheduler.asked[0].request
            if "block_ttft_s" in passed:
                assert asked.slo.ttft_s == passed["block_ttft_s"]
                assert asked.slo.tpot_s == passed["block_tpot_s"]
            if "block_class" in passed:
                assert asked.request_class == common_pb2.REQUEST_CLASS_BEST_EFFORT
            assert asked.weight == passed.get("block_weight", 0.0)
            assert asked.session_id == passed.get("block_session_id", "")
            assert asked.client_id == passed.get("block_client_id", "")

    run(test)


def test_a_body_that_says_everything_itself_is_not_written_again() -> None:
    """The engine gets the client's own bytes."""
    body = b'{"prompt":"x" , "vllm_xargs": {"block_ttft_s":1.50, "block_class":"best-effort"}}'

    async def test() -> None:
        async with scene(completes) as here:
            await here.client.post(PATHS[0], content=body, headers={"x-slo-ttft-ms": "250"})
            assert here.engines[0].calls[0].body == body
            assert here.scheduler.asked[0].request.slo.ttft_s == 1.5

    run(test)


def test_an_api_key_says_who_the_client_is() -> None:
    """A client cannot name another one, neither to the scheduler nor to the engine."""

    async def test() -> None:
        async with scene(completes, keys=(key("secret-a", "tenant-a"),)) as here:
            await here.post(headers={"authorization": "Bearer secret-a"}, vllm_xargs={"block_client_id": "tenant-b"})
            assert json.loads(here.engines[0].calls[0].body)["vllm_xargs"] == {"block_client_id": "tenant-a"}
            assert here.scheduler.asked[0].request.client_id == "tenant-a"

    run(test)


def test_the_reply_names_instance_and_policy() -> None:
    """Instance, policy, forecast and decision time are headers, beside those of the engine."""

    async def test() -> None:
        async with scene(streams, completes) as here:
            for stream in (True, False):
                response = await here.post(stream=stream, headers={"x-request-id": "abc"})
                assert response.headers["x-block-instance"] == "e0"
                assert response.headers["x-block-policy"] == "first"
                assert response.headers["x-block-predicted-ttft-ms"] == "125.0"
                assert response.headers["x-block-predicted-e2e-ms"] == "2500.0"
                assert float(response.headers["x-block-decision-ms"]) > 0
                assert response.headers["x-request-id"] == "abc"
                assert response.headers.get_list("date", split_commas=False)[1:] == []
            assert response.headers["x-engine"] == "yes"

    run(test)


def test_an_answer_in_one_piece_passes_with_its_length() -> None:
    """Without streaming the client gets the engine's bytes and their length; the outcome has the engine's counts."""

    async def test() -> None:
        async with scene(completes) as here:
            response = await here.post()
            assert response.json() == COMPLETION
            assert int(response.headers["content-length"]) == len(response.content)
            outcome = (await here.scheduler.released.get()).outcome
            assert (outcome.prompt_tokens, outcome.output_tokens, outcome.finish_reason) == (7, 3, STOP)
            assert outcome.e2e_s > 0
            assert not outcome.HasField("ttft_s")

    run(test)


def test_the_outcome_of_a_stream() -> None:
    """Tokens are counted in events, times from the arrival; the decision's tag and forecast are included."""

    async def test() -> None:
        async with scene(streams) as here:
            await here.post(stream=True, headers={"x-session-id": "s-1", "x-request-id": "r-1"})
            release = await here.scheduler.released.get()
            outcome = release.outcome
            assert (release.request_id, release.instance_id) == ("r-1", "e0")
            assert (outcome.request_id, outcome.instance_id, outcome.model) == ("r-1", "e0", "tiny")
            assert (outcome.output_tokens, outcome.finish_reason, outcome.session_id) == (3, LENGTH, "s-1")
            assert 0 < outcome.ttft_s <= outcome.e2e_s
            assert outcome.tpot_s == pytest.approx((outcome.e2e_s - outcome.ttft_s) / 2)
            assert (outcome.tag.median_tokens, list(outcome.tag.keys), outcome.policy) == (3, [1, 2], "first")
            assert outcome.forecast.e2e_s == 2.5

    run(test)


TOO_LONG = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}


async def refuses(call: Call) -> None:
    """Reply with an error of the request."""
    call.whole(TOO_LONG, 400)


def test_an_engine_refuses_a_request() -> None:
    """The engine's error goes to the client unchanged, no other engine is tried, and the engine is not blamed."""

    async def test() -> None:
        async with scene(refuses, completes) as here:
            response = await here.post()
            assert (response.status_code, response.json()) == (400, TOO_LONG)
            assert here.engines[1].calls == []
            outcome = (await here.scheduler.released.get()).outcome
            assert outcome.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED

    run(test)


ASKED = (
    ({}, {}, {"model": "tiny", "priority": 0, "ignore_eos": False}),
    (
        {"max_tokens": 5, "min_tokens": 2, "ignore_eos": True},
        {},
        {"max_tokens": 5, "min_tokens": 2, "ignore_eos": True},
    ),
    ({"priority": 3}, {}, {"priority": 3}),
    ({"priority": 3}, {"x-block-priority": "-7"}, {"priority": 3}),
    ({}, {"x-block-priority": "-7"}, {"priority": -7}),
    ({"nvext": {"agent_hints": {"osl": 40, "priority": 2}}}, {}, {"expected_output_tokens": 40, "priority": -2}),
    ({"prompt": [5, 6, 7]}, {}, {"prompt_tokens": 3}),
    ({"prompt": [[5, 6, 7], [8]]}, {}, {"prompt_tokens": 4}),
    ({"prompt": "x" * 400}, {}, {"prompt_tokens": 100}),
    ({"prompt": ["x" * 200, "x" * 199]}, {}, {"prompt_tokens": 100}),
    ({}, {"x-session-id": "s"}, {"session_id": "s"}),
    ({}, {"x-llm-d-inference-fairness-id": "tenant"}, {"client_id": "tenant"}),
    ({}, {"x-block-class": "best-effort"}, {"request_class": common_pb2.REQUEST_CLASS_BEST_EFFORT}),
    ({}, {"x-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "12.5"}, {"slo": common_pb2.Slo(ttft_s=0.25, tpot_s=0.0125)}),
)


def test_the_facts_that_a_scheduler_receives() -> None:
    """Lengths, limits, targets and hints of body and headers reach the scheduler."""

    async def test() -> None:
        async with scene(refuses) as here:
            for fields, headers, told in ASKED:
                await here.post(headers=headers, **fields)
                asked = (await here.scheduler.seen.get()).request
                for name, value in told.items():
                    assert getattr(asked, name) == value, name
                assert 0 <= asked.waited_s < LIMIT_S
                assert asked.HasField("max_tokens") == ("max_tokens" in fields)

    run(test)


def test_a_scheduler_receives_a_chat_as_text() -> None:
    """Roles and texts of a chat, and tokens of its images; max_completion_tokens has precedence over max_tokens."""
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, image]},
        {"role": "assistant", "content": None},
    ]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 9, "max_completion_tokens": 4}

    async def test() -> None:
        async with scene(completes) as here:
            await here.client.post("/v1/chat/completions", json=fields)
            (asked,) = here.scheduler.asked
            assert asked.prompt == b"system\nBe brief.\nuser\nWhat is\nassistant"
            assert asked.request.max_tokens == 4
            assert asked.request.prompt_tokens == round(len(asked.prompt) / 4) + 3 * 4 + ESTIMATED_IMAGE_TOKENS

    run(test)


def test_prompt_sizes_are_learnt() -> None:
    """Later prompts are estimated by the ratio of earlier counts."""

    async def counts(call: Call) -> None:
        tokens = len(json.loads(call.body)["prompt"]) // 2
        call.whole({**COMPLETION, "usage": {"prompt_tokens": tokens, "completion_tokens": 1}})

    async def test() -> None:
        async with scene(counts) as here:
            for _ in range(20):
                await here.post(prompt="x" * 4000)
            told = [asked.request.prompt_tokens for asked in here.scheduler.asked]
            assert told[0] == 1000
            assert told[-1] == pytest.approx(2000, rel=0.05)

    run(test)


def test_request_ids() -> None:
    """A missing id is generated; two simultaneous requests of one id get different ids behind the gateway."""
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        call.whole(COMPLETION)

    async def test() -> None:
        async with scene(waits) as here:
            posts = [asyncio.create_task(here.post(headers={"x-request-id": "same"})) for _ in range(2)]
            posts.append(asyncio.create_task(here.post()))
            for _ in range(3):
                await here.scheduler.seen.get()
            go_on.set()
            shown = [(await post).headers["x-request-id"] for post in posts]
            assert shown[:2] == ["same", "same"]
            assert len(shown[2]) >= 16
            inner = {asked.request.request_id for asked in here.scheduler.asked}
            assert len(inner) == 3
            assert inner == {call.headers["x-request-id"] for call in here.engines[0].calls}

    run(test)


def test_an_explanation_on_request() -> None:
    """One header requests an explanation, another one returns it."""

    async def test() -> None:
        async with scene(completes, completes) as here:
            plain = await here.post()
            assert "x-block-explanation" not in plain.headers
            assert not here.scheduler.asked[0].explain
            told = await here.client.post(
                "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers={"x-block-explain": "true"}
            )
            explanation = json.loads(told.headers["x-block-explanation"])
            assert explanation["policy"] == "first"
            assert explanation["why"] == "it is the first"
            assert [one["instance"] for one in explanation["candidates"]] == ["e0", "e1"]
            wrong = await here.client.post(
                "/v1/completions", json={"model": "tiny", "prompt": "x"}, headers={"x-block-explain": "perhaps"}
            )
            assert wrong.status_code == 400
            assert "x-block-explain" in wrong.json()["error"]["message"]

    run(test)


def test_no_delay_on_accepted_connections() -> None:
    """Accepted connections send small pieces at once."""
    with listening(LOCAL, 0) as own:
        own.listen()
        with socket.create_connection(own.getsockname()):
            own.setblocking(True)
            accepted, _ = own.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_health_readiness_and_metrics() -> None:
    """Health is the process's, readiness is that requests can be placed; metrics count replies."""

    async def ready(client: httpx.AsyncClient, status: int) -> None:
        while (await client.get("/ready")).status_code != status:
            pass  # until the channel is connected

    async def test() -> None:
        async with scene(streams) as here:
            assert (await here.client.get("/health")).status_code == 200
            await ready(here.client, 200)
            await here.scheduler.stop()
            await ready(here.client, 503)
            assert (await here.client.get("/health")).status_code == 200
            await here.scheduler.start()
            await ready(here.client, 200)
            await here.post(stream=True)
            assert await here.metric('block_gateway_requests_total{path="/v1/completions",status="200"}') == 1
            assert await here.metric("block_gateway_output_tokens_total") == 3
            assert await here.metric("block_gateway_ttft_seconds_count") == 1
            await here.scheduler.released.get()
            await here.scheduler.stop()
            assert (await here.client.get("/ready")).status_code == 200  # an instance is known now

    run(test)
