"""The proxy before a mirrored engine: bytes pass unchanged, and failures become OpenAI's errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.services.emulator.running import emulated
from tests.services.predictor_server.running_mirrors import RawEngine, mirror_of, raw_engine
from tests.services.predictor_server.running_sidecars import run
from tests.services.waiting import PATIENCE_S

STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-engine: raw\r\nconnection: close\r\n\r\n"
)
EVENTS = (
    'data: {"choices":[{"index":0,"text":"grüß"}]}\n\n'
    ": a comment, and an event of two lines\n\n"
    'data: {"choices":[{"index":0,\ndata: "text":"\\n\\n"}]}\r\n\r\n'
    'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
    "data: [DONE]\n\n"
).encode()
BODY = {"prompt": "Hello", "stream": True, "n": 1, "unknown_field": [1, {"a": "ü"}]}
SETTINGS = {"num_gpu_blocks": 257, "block_size": 16, "max_num_seqs": 16, "max_model_len": 1024}  # it reports none


def whole(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """Return a reply in one piece."""
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), b"connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_passes_byte_for_byte(size: int) -> None:
    """However its bytes are cut, and whatever its events consist of."""
    pieces = [EVENTS[start : start + size] for start in range(0, len(EVENTS), size)]

    async def test() -> None:
        async with raw_engine(STREAM, *pieces) as engine, mirror_of(engine.url, engine=SETTINGS) as client:
            reply = await client.http.post("/v1/completions", json=BODY)
            assert reply.content == EVENTS
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert reply.headers["x-engine"] == "raw"

    run(test())


def test_a_request_passes_byte_for_byte() -> None:
    """Body, path, query and headers reach the engine as the client wrote them."""
    body = b'{ "prompt" : "Hello",\n "n":1 }'

    async def test() -> None:
        async with raw_engine(whole(b"{}")) as engine, mirror_of(engine.url, engine=SETTINGS) as client:
            headers = {
                "content-type": "application/json",
                "authorization": "Bearer k",
                "x-request-id": "one",
                "x-own": "ü",
            }
            await client.http.post(
                "/v1/completions?a=%20b&c",
                content=body,
                headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            )
            head, _, passed = engine.received[0].partition(b"\r\n\r\n")
            assert passed == body
            assert head.startswith(b"POST /v1/completions?a=%20b&c HTTP/1.1\r\n")
            for name, value in headers.items():
                assert f"{name}: {value}".encode() in head

    run(test())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/some/thing?x=1", 200),
        ("POST", "/v1/embeddings", 201),
        ("DELETE", "/v1/x%2Fy", 418),
        ("PUT", "/", 500),
    ],
)
def test_other_requests_pass_byte_for_byte(method: str, path: str, status: int) -> None:
    """Any method on any path returns the engine's reply, binary bodies and errors included."""
    body = bytes(range(256)) * 300

    async def test() -> None:
        raw = whole(body, b"%d Own" % status, b"x-engine: raw", b"content-type: application/x-own")
        async with raw_engine(raw) as engine, mirror_of(engine.url, engine=SETTINGS) as client:
            reply = await client.http.request(method, path, content=b"\x00\xff")
            assert (reply.status_code, reply.content) == (status, body)
            assert (reply.headers["x-engine"], reply.headers["content-type"]) == ("raw", "application/x-own")
            assert engine.received[0].startswith(f"{method} {path} HTTP/1.1".encode())
            assert engine.received[0].endswith(b"\r\n\r\n\x00\xff")
            head = await client.http.head("/v1/some")
            assert (head.status_code, head.content, head.headers["content-length"]) == (status, b"", str(len(body)))

    run(test())


def test_a_client_that_disconnects_cancels_the_engines_request() -> None:
    """The engine's connection is closed, and the mirror removes the request."""

    async def test() -> None:
        async with (
            raw_engine(STREAM + EVENTS[:60], EVENTS[60:]) as engine,
            mirror_of(engine.url, engine=SETTINGS) as client,
        ):
            engine.pause = asyncio.Event()
            async with client.http.stream("POST", "/v1/completions", json=BODY) as reply:
                pieces = reply.aiter_raw()  # kept, as the reply is closed with it
                await anext(pieces)
                await client.until(lambda: len(client.mirror.proxy) == 1)
            await asyncio.wait_for(engine.gone.wait(), PATIENCE_S)
            await client.until(lambda: len(client.mirror.proxy) == 0)
            assert client.rpc.sample("block_proxy_requests_total", path="/v1/completions", code="499") == 1

    run(test())


async def refusal(reply: httpx.Response, status: int) -> dict[str, object]:
    """Return the error object of a reply."""
    assert reply.status_code == status, reply.text
    error: dict[str, object] = reply.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def test_an_engine_that_is_not_there_is_unavailable() -> None:
    """Every request gets a 503 in OpenAI's form, with a time to retry after."""

    async def test() -> None:
        async with mirror_of(f"http://127.0.0.1:{free_port()}", engine=SETTINGS) as client:
            for reply in (await client.complete(), await client.http.get("/v1/models")):
                assert "cannot be reached" in str((await refusal(reply, 503))["message"])
                assert reply.headers["retry-after"]

    run(test())


@pytest.mark.parametrize(
    ("replies", "status"),
    [((b"",), 502), ((b"nonsense\r\n\r\n",), 502), ((whole(b"x" * 9)[:-3],), 502), ((b"HTTP/1.1 200 OK\r\n",), 502)],
)
def test_an_incomplete_reply_is_a_failure(replies: tuple[bytes, ...], status: int) -> None:
    """Its parts are not passed on."""

    async def test() -> None:
        async with raw_engine(*replies) as engine, mirror_of(engine.url, engine=SETTINGS) as client:
            await refusal(await client.complete(), status)

    run(test())


def test_an_engine_that_does_not_reply_times_out() -> None:
    """The limit is on the time without any byte."""

    async def test() -> None:
        async with raw_engine(b"", b"never") as engine, mirror_of(engine.url, engine=SETTINGS, idle_s=0.1) as client:
            engine.pause = asyncio.Event()
            await refusal(await client.complete(), 504)
            engine.pause.set()

    run(test())


def test_a_broken_stream_ends_with_an_error_event() -> None:
    """Whole events first, then the error as the last event; no half of an event is passed on."""
    chunked = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")
    first = EVENTS.partition(b"\n\n")[0] + b"\n\n"
    piece = first + b'data: {"choices":[{"ind'

    async def test() -> None:
        pieces = (chunked, b"%x\r\n%b\r\n" % (len(piece), piece))
        async with raw_engine(*pieces) as engine, mirror_of(engine.url, engine=SETTINGS) as client:
            reply = await client.http.post("/v1/completions", json=BODY)
            assert reply.content.startswith(first)
            last = reply.content.removeprefix(first)
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"

    run(test())


def test_bodies_and_completions_have_limits() -> None:
    """With the same statuses as the gateway's."""

    async def test() -> None:
        async with raw_engine(STREAM, b"", EVENTS) as engine:
            engine.pause = asyncio.Event()
            limits = {"max_concurrency": 2, "max_body_bytes": 1000}
            async with mirror_of(engine.url, engine=SETTINGS, **limits) as client:
                await refusal(await client.complete(prompt="x" * 2000), 413)
                await refusal(await client.http.post("/v1/other", content=b"x" * 2000), 413)
                tasks = [asyncio.create_task(client.http.post("/v1/completions", json=BODY)) for _ in range(2)]
                await client.until(lambda: len(engine.received) == 2)
                await refusal(await client.complete(), 429)
                engine.pause.set()
                for task in tasks:
                    assert (await task).content == EVENTS

    run(test())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": 3}',
        b'{"max_tokens": -1, "prompt": "a"}',
        b'{"prompt": [], "n": 9}',
        b"\xff",
    ],
)
def test_the_engine_refuses_an_invalid_body(body: bytes, tmp_path: Path) -> None:
    """The client gets the engine's own error, and nothing is mirrored."""

    async def test(url: str) -> None:
        async with mirror_of(url, speed=200.0) as client, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as direct:
            for path in ("/v1/completions", "/v1/chat/completions"):
                headers = {"content-type": "application/json"}
                through = await client.http.post(path, content=body, headers=headers)
                straight = await direct.post(path, content=body, headers=headers)
                assert (through.status_code, through.content) == (straight.status_code, straight.content)
            await client.rpc.until(
                lambda response: response.indicators.num_running + response.indicators.num_waiting == 0
            )

    with emulated(tmp_path, state_file="", speed=200.0) as engine:
        run(test(str(engine.client.base_url).rstrip("/")))


def test_a_shutdown_lets_streams_finish() -> None:
    """Completions under way when the sidecar stops are not cut off before the drain time is over."""

    async def stop_during_a_stream(engine: RawEngine) -> bytes:
        async with mirror_of(engine.url, engine=SETTINGS, drain_s=PATIENCE_S) as client:
            task = asyncio.create_task(stream(str(client.http.base_url).rstrip("/")))
            await client.until(lambda: len(client.mirror.proxy) == 1)
            asyncio.get_running_loop().call_later(0.2, resume, engine)
        return await task

    def resume(engine: RawEngine) -> None:
        assert engine.pause is not None
        engine.pause.set()

    async def stream(url: str) -> bytes:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return (await client.post(f"{url}/v1/completions", json=BODY)).content

    async def test() -> None:
        async with raw_engine(STREAM, EVENTS[:60], EVENTS[60:]) as engine:
            engine.pause = asyncio.Event()
            assert await stop_during_a_stream(engine) == EVENTS

    run(test())
