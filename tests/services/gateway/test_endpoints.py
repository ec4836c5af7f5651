"""Every endpoint of engines through the gateway: how it is placed, what passes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import anthropic
import httpx
import pytest

from protos.block.v1 import common_pb2
from services.gateway import announced_paths
from tests.services.gateway.stubs import COMPLETION, LOCAL, Call, Scene, completes, scene, unreachable
from tests.services.security.key_files import key
from tests.services.waiting import run, until

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
HI = [{"role": "user", "content": "Say hello"}]
ASK = {"model": "tiny", "input": "Say hello"}
MESSAGE = {"model": "tiny", "messages": HI, "max_tokens": 4}
EMBEDDINGS = {
    "object": "list", "data": [{"index": 0, "embedding": [0.5, -1.0]}], "usage": {"prompt_tokens": 9, "total_tokens": 9},
}  # fmt: skip


def named(name: str, **fields: Any) -> bytes:
    """Write an event with a name."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def response(response_id: str, status: str = "completed") -> dict[str, Any]:
    """Write a response."""
    return {"id": response_id, "object": "response", "status": status, "usage": {"input_tokens": 7, "output_tokens": 2}}


def response_events(response_id: str) -> list[bytes]:
    """Write the events of a response."""
    return [
        named("response.created", response={"id": response_id, "status": "in_progress"}),
        named("response.in_progress", response={"id": response_id, "status": "in_progress"}),
        named("response.output_text.delta", delta="Hel"),
        named("response.output_text.delta", delta="lo"),
        named("response.completed", response=response(response_id)),
    ]


async def responds(call: Call) -> None:
    """Reply to /v1/responses as vLLM does."""
    if call.target.startswith("/v1/responses/"):
        call.whole({"id": call.target.split("/")[3].partition("?")[0], "status": "completed", "path": call.target})
        return
    body = json.loads(call.body)
    if not body.get("stream"):
        call.whole(response(body["request_id"]))
        return
    call.stream()
    for event in response_events(body["request_id"]):
        await call.chunk(event)
    call.end()


async def dies_at_once(call: Call) -> None:
    """Begin a response, and die before the engine has computed anything."""
    call.stream()
    for event in response_events("resp_lost")[:2]:
        await call.chunk(event)
    call.die()


async def released(here: Scene) -> common_pb2.Outcome:
    """Return the next outcome."""
    return (await here.scheduler.released.get()).outcome


def test_a_response_is_placed_streamed_and_released() -> None:
    """The forecast is of its prompt; the stream passes byte for byte, and its usage is in the outcome."""

    async def test() -> None:
        async with scene(responds) as here:
            asked = {**ASK, "instructions": "Be brief", "max_output_tokens": 3, "stream": True}
            reply = await here.client.post("/v1/responses", json=asked, headers={"x-request-id": "mine"})
            (request,) = [one.request for one in here.scheduler.asked]
            assert (request.request_id, request.max_tokens, request.leg) == ("mine", 3, common_pb2.LEG_SERVE)
            sent = json.loads(here.engines[0].calls[0].body)
            assert sent["request_id"].startswith("resp_mine_")
            assert reply.content == b"".join(response_events(sent["request_id"]))
            assert reply.headers["x-block-predicted-ttft-ms"]
            outcome = await released(here)
            assert (outcome.prompt_tokens, outcome.output_tokens, outcome.finish_reason) == (7, 2, STOP)
            assert outcome.HasField("ttft_s")

    run(test)


def test_a_response_that_has_only_been_announced_goes_elsewhere() -> None:
    """The first events come before the engine computes; a death after them costs a retry, and no stream."""

    async def test() -> None:
        async with scene(dies_at_once, responds) as here:
            reply = await here.client.post("/v1/responses", json={**ASK, "stream": True})
            assert reply.headers["x-block-instance"] == "e1"
            assert b"resp_lost" not in reply.content
            assert reply.content.endswith(b"\n\n")
            assert b"response.completed" in reply.content
            assert await here.metric("block_gateway_retries_total") == 1

    run(test)


def test_a_kept_response_is_requested_and_continued_where_it_is() -> None:
    """GET, cancel and continuations go to its instance; another key does not find it."""

    async def test() -> None:
        async with scene(responds, responds, keys=(key("sk-a", "ann"), key("sk-b", "bob"))) as here:
            ann, bob = {"authorization": "Bearer sk-a"}, {"authorization": "Bearer sk-b"}
            here.scheduler.instances.reverse()  # so that it is made at e1, and others would go to e0
            made = (await here.client.post("/v1/responses", json=ASK, headers=ann)).json()["id"]
            here.scheduler.instances.reverse()
            got = await here.client.get(f"/v1/responses/{made}?stream=false", headers=ann)
            assert (got.status_code, got.json()["path"]) == (200, f"/v1/responses/{made}?stream=false")
            assert got.headers["x-block-instance"] == "e1"
            cancelled = await here.client.post(f"/v1/responses/{made}/cancel", headers=ann)
            assert cancelled.json()["path"] == f"/v1/responses/{made}/cancel"
            more = {**ASK, "previous_response_id": made}
            reply = await here.client.post("/v1/responses", json=more, headers=ann)
            assert (reply.status_code, reply.headers["x-block-instance"]) == (200, "e1")
            assert list(here.scheduler.asked[-1].exclude_instance_ids) == ["e0"]
            assert not {"authorization", "x-api-key"} & here.engines[1].calls[-1].headers.keys()
            for path in (f"/v1/responses/{made}", "/v1/responses/resp_unknown"):
                assert (await here.client.get(path, headers=bob)).status_code == 404
            named = await here.client.post("/v1/responses", json={**ASK, "request_id": made}, headers=bob)
            assert (named.status_code, named.json()["id"]) == (200, made)
            assert (await here.client.get(f"/v1/responses/{made}", headers=bob)).status_code == 404
            assert (await here.client.get(f"/v1/responses/{made}", headers=ann)).status_code == 200
            lost = await here.client.post("/v1/responses", json=more, headers=bob)
            assert (lost.status_code, lost.json()["error"]["code"]) == (404, "previous_response_not_found")
            wrong = await here.client.delete(f"/v1/responses/{made}", headers=ann)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
            assert await here.metric('block_gateway_requests_total{path="/v1/responses/{id}"') == 6

    run(test)


def test_a_continuation_never_goes_to_an_instance_that_does_not_know_the_response() -> None:
    """Without its instance it fails, even though others could serve."""

    async def test() -> None:
        async with scene(responds, responds) as here:
            made = (await here.client.post("/v1/responses", json=ASK)).json()["id"]
            await here.engines[0].stop()
            reply = await here.client.post("/v1/responses", json={**ASK, "previous_response_id": made})
            assert reply.status_code == 503
            assert not here.engines[1].calls
            assert (await here.client.get(f"/v1/responses/{made}")).status_code == 503

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "num_prompts"),
    [
        ("/v1/embeddings", {"input": "Say hello"}, 0),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/pooling", {"input": "a"}, 0),
        ("/classify", {"input": "a"}, 0),
        ("/v2/embed", {"texts": ["a", "b"]}, 2),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, 2),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, 0),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}, 2),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}, 2),
        ("/v2/rerank", {"query": "a", "documents": ["b", "c"]}, 2),
    ],
)
def test_what_generates_nothing_is_forecast_by_its_prompts(path: str, body: dict[str, Any], num_prompts: int) -> None:
    """One step ends it; it is served by one engine, and its reply passes byte for byte."""

    async def embeds(call: Call) -> None:
        call.whole(EMBEDDINGS)

    async def test() -> None:
        async with scene(embeds) as here:
            reply = await here.client.post(path, json={"model": "tiny", **body})
            assert (reply.status_code, reply.json()) == (200, EMBEDDINGS)
            assert here.engines[0].calls[0].target == path
            request = here.scheduler.asked[0].request
            assert (request.output_tokens, request.max_tokens, request.num_prompts) == (1, 1, num_prompts)
            assert request.leg == common_pb2.LEG_SERVE
            outcome = await released(here)
            assert (outcome.prompt_tokens, outcome.output_tokens, outcome.finish_reason) == (9, 0, STOP)

    run(test)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
def test_what_needs_no_engine_step_reserves_nothing(path: str, body: dict[str, Any]) -> None:
    """Any instance with the model serves it, and another one if the first refuses."""

    async def refuses(call: Call) -> None:
        call.whole({"error": {"message": "busy"}}, 503)

    async def test() -> None:
        async with scene(refuses, completes) as here:
            reply = await here.client.post(path, json={"model": "tiny", **body})
            assert (reply.status_code, reply.json()) == (200, COMPLETION)
            assert [(one.dry_run, one.policy) for one in here.scheduler.asked] == [(True, "random")] * 2
            assert here.scheduler.released.empty()
            assert "x-block-predicted-ttft-ms" not in reply.headers

    run(test)


def test_audio_passes_byte_for_byte() -> None:
    """A form is placed by the length of its audio; what speech returns need not be JSON."""

    async def transcribes(call: Call) -> None:
        if call.target.endswith("speech"):
            call.head(200, "audio/wav", "content-length: 4")
            call.writer.write(b"RIFF")
        else:
            call.whole({"text": "hello", "usage": {"type": "duration", "seconds": 2}})

    async def test() -> None:
        async with scene(transcribes) as here:
            files, data = {"file": ("a.mp3", b"\xff\x00" * 16_000)}, {"model": "tiny", "x": "y"}
            sent = here.client.build_request("POST", "/v1/audio/transcriptions", files=files, data=data)
            body = b"".join([piece async for piece in sent.stream])  # type: ignore[union-attr]
            reply = await here.client.post(
                "/v1/audio/transcriptions", content=body,
                headers={"content-type": sent.headers["content-type"], "x-block-priority": "3"},
            )  # fmt: skip
            assert reply.json()["text"] == "hello"
            assert here.engines[0].calls[0].body == body
            request = here.scheduler.asked[0].request
            assert (request.model, request.prompt_tokens, request.priority) == ("tiny", 100, 3)
            spoken = await here.client.post("/v1/audio/speech", json={"model": "tiny", "input": "hi", "voice": "a"})
            assert (spoken.content, spoken.headers["content-type"]) == (b"RIFF", "audio/wav")
            names = {"kv_transfer_params": "{}", **data}
            refused = await here.client.post("/v1/audio/transcriptions", files=files, data=names)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")

    run(test)


def test_announced_paths() -> None:
    """A path that an instance announces is served by such an instance; administration never is."""
    asked: list[str] = []

    def announces(*paths: str) -> Any:
        async def answer(call: Call) -> None:
            asked.append(call.target)
            if call.target == "/openapi.json":
                call.whole({"paths": {path: {"post": {}} for path in paths}})
            else:
                call.whole({"served": call.target})

        return answer

    admin = ("/v1/load_lora_adapter", "/sleep", "/reset_prefix_cache", "/collective_rpc", "/pause", "/v1/abort_requests",
             "/update_weights", "/invocations", "/inference/v1/abort_requests")  # fmt: skip

    async def test() -> None:
        async with scene(announces(*admin), announces("/v1/new/thing", *admin)) as here:
            body = {"model": "tiny", "text": "Say hello", "max_tokens": 3}
            for _ in range(2):
                reply = await here.client.post("/v1/new/thing?a=b", json=body)
                assert (reply.json(), reply.headers["x-block-instance"]) == ({"served": "/v1/new/thing?a=b"}, "e1")
            assert here.scheduler.asked[0].request.max_tokens == 3
            assert asked.count("/openapi.json") == 2  # once at each instance
            for path in (*admin, "/v1/other", "/v1/new/thing/", "/v1/../sleep", "/v1/%2e%2e/sleep"):
                reply = await here.client.post(path, json=body)
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path
            assert (await here.client.get("/v1/new/thing")).status_code == 404
            assert set(asked) == {"/openapi.json", "/v1/new/thing?a=b"}
            blocks = await here.client.post("/v1/new/thing", json={**body, "kv_transfer_params": {}})
            assert blocks.status_code == 400

    run(test)


def test_announced_paths_stay_known_while_schedulers_do_not_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first reply of one, a path may be announced: the status is 503, as for a model."""
    monkeypatch.setattr(announced_paths, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(announced_paths, "RETRY_S", 0.0)

    async def announces(call: Call) -> None:
        call.whole({"paths": {"/v1/new/thing": {"post": {}}}} if call.target == "/openapi.json" else {"ok": True})

    async def test() -> None:
        async with scene(announces) as here:

            async def status(path: str) -> int:
                return (await here.client.post(path, json={"model": "tiny", "text": "x"})).status_code

            async def is_served() -> bool:
                return await status("/v1/new/thing") == 200

            await here.scheduler.stop()
            assert [await status(path) for path in ("/v1/new/thing", "/v1/other", "/nowhere")] == [503, 503, 404]
            await here.scheduler.start()
            await until(is_served)
            await here.scheduler.stop()
            assert [await status(path) for path in ("/v1/new/thing", "/v1/other")] == [200, 404]
        async with scene(announces, schedulers=(), engine_urls=(unreachable(),)) as here:
            assert await status("/v1/new/thing") == 404

    run(test)


def test_realtime_and_methods_are_refused_in_one_line() -> None:
    """A WebSocket gets a status, and every endpoint names its methods."""

    async def test() -> None:
        async with scene(completes) as here:
            upgrade = "GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
            key = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            reader, writer = await asyncio.open_connection(LOCAL, here.port)
            writer.write((upgrade + key).encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/v1/audio/speech"):
                reply = await here.client.get(path)
                assert (reply.status_code, reply.headers["allow"]) == (405, "POST")

    run(test)


def test_errors_of_messages_have_the_shape_of_anthropic() -> None:
    """Whether the gateway refuses, no instance is left, or the engine dies within the stream."""

    async def dies(call: Call) -> None:
        call.stream()
        await call.chunk(named("message_start", message={"usage": {"input_tokens": 0, "output_tokens": 0}}))
        await call.chunk(named("content_block_delta", delta={"text": "a"}))
        call.die()

    async def test() -> None:
        async with scene(dies, keys=(key("sk-a"),)) as here:
            options = {"base_url": f"http://{LOCAL}:{here.port}", "max_retries": 0}
            async with anthropic.AsyncAnthropic(api_key="sk-wrong", **options) as client:  # type: ignore[arg-type]
                with pytest.raises(anthropic.AuthenticationError, match="API key"):
                    await client.messages.create(**MESSAGE)  # type: ignore[arg-type]
            async with anthropic.AsyncAnthropic(api_key="sk-a", **options) as client:  # type: ignore[arg-type]
                with pytest.raises(anthropic.BadRequestError, match="max_tokens: "):
                    await client.messages.create(**{**MESSAGE, "max_tokens": -1})  # type: ignore[arg-type]
                stream = await client.messages.create(**MESSAGE, stream=True)  # type: ignore[call-overload]
                seen = []
                with pytest.raises(anthropic.APIStatusError, match="broke the connection"):
                    async for event in stream:
                        seen.append(event.type)  # noqa: PERF401 - those before the error count
                assert seen == ["message_start", "content_block_delta"]
                assert await here.metric('block_gateway_migrations_total{result="messages"') == 1
                await here.scheduler.stop()
                await here.engines[0].stop()
                with pytest.raises(anthropic.InternalServerError):
                    await client.messages.create(**MESSAGE)  # type: ignore[arg-type]

    run(test)


def test_an_error_within_a_response_is_an_event_with_a_name() -> None:
    """Clients that read names, and those that look for an error, both see it."""

    async def dies(call: Call) -> None:
        call.stream()
        for event in response_events("resp_1")[:3]:
            await call.chunk(event)
        call.die()

    async def test() -> None:
        async with scene(dies) as here:
            reply = await here.client.post("/v1/responses", json={**ASK, "stream": True})
            name, data = reply.text.split("\n\n")[-2].split("\n")
            assert name == "event: error"
            error = json.loads(data.removeprefix("data: "))
            assert (error["type"], error["error"]["code"]) == ("error", "engine_failed")

    run(test)


def test_a_client_that_half_uploads_a_form_costs_nothing() -> None:
    """Its request ends without a placement."""

    async def test() -> None:
        async with scene(completes) as here:
            head = "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            with socket.create_connection((LOCAL, here.port)) as client:
                client.sendall(f"{head}content-type: multipart/form-data; boundary=x\r\n\r\n--x".encode())
            assert (await here.client.get("/health")).status_code == 200
            await until(lambda: _is(here, 0))
            assert not here.scheduler.asked

    run(test)


async def _is(here: Scene, under_way: int) -> bool:
    return await here.metric("block_gateway_requests_under_way") == under_way


def test_other_clients_than_official_ones_may_leave_out_the_model() -> None:
    """A body without a model goes to any instance."""

    async def test() -> None:
        async with scene(completes) as here:
            reply: httpx.Response = await here.client.post("/tokenize", json={"prompt": "a"})
            assert reply.status_code == 200
            assert here.scheduler.asked[0].request.model == ""

    run(test)
