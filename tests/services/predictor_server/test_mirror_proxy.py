"""The proxy before a mirrored engine: what passes, passes as it is; what cannot is told in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.services.emulator.running import emulated
from tests.services.predictor_server.asking import run
from tests.services.predictor_server.mirrored import RawEngine, mirror_of, raw_engine

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
ASK = {"prompt": "Hello", "stream": True, "n": 1, "unknown_field": [1, {"a": "ü"}]}
MEBIBYTE = 2**20


def whole(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    """An answer in one piece."""
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), b"connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_passes_byte_for_byte(size: int) -> None:
    """However its bytes are cut, and whatever its events are made of."""
    pieces = [EVENTS[start : start + size] for start in range(0, len(EVENTS), size)]

    async def test() -> None:
        async with raw_engine(STREAM, *pieces) as engine, mirror_of(engine.url, engine=told()) as mirrored:
            answer = await mirrored.client.post("/v1/completions", json=ASK)
            assert answer.content == EVENTS
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["x-engine"] == "raw"

    run(test())


def told() -> dict[str, int]:
    """Settings of an engine that tells nothing."""
    return {"num_gpu_blocks": 257, "block_size": 16, "max_num_seqs": 16, "max_model_len": 1024}


def test_what_is_asked_passes_byte_for_byte() -> None:
    """Body, path, query and headers reach the engine as the client wrote them."""
    body = b'{ "prompt" : "Hello",\n "n":1 }'

    async def test() -> None:
        async with raw_engine(whole(b"{}")) as engine, mirror_of(engine.url, engine=told()) as mirrored:
            headers = {
                "content-type": "application/json",
                "authorization": "Bearer k",
                "x-request-id": "one",
                "x-own": "ü",
            }
            await mirrored.client.post(
                "/v1/completions?a=%20b&c",
                content=body,
                headers=[(name.encode(), value.encode()) for name, value in headers.items()],
            )
            head, _, passed = engine.told[0].partition(b"\r\n\r\n")
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
def test_everything_else_passes_untouched(method: str, path: str, status: int) -> None:
    """Any method on any path has the engine's answer, bytes that are no text and errors too."""
    body = bytes(range(256)) * 300

    async def test() -> None:
        answer = whole(body, b"%d Own" % status, b"x-engine: raw", b"content-type: application/x-own")
        async with raw_engine(answer) as engine, mirror_of(engine.url, engine=told()) as mirrored:
            got = await mirrored.client.request(method, path, content=b"\x00\xff")
            assert (got.status_code, got.content) == (status, body)
            assert (got.headers["x-engine"], got.headers["content-type"]) == ("raw", "application/x-own")
            assert engine.told[0].startswith(f"{method} {path} HTTP/1.1".encode())
            assert engine.told[0].endswith(b"\r\n\r\n\x00\xff")
            head = await mirrored.client.head("/v1/some")
            assert (head.status_code, head.content, head.headers["content-length"]) == (status, b"", str(len(body)))

    run(test())


def test_a_client_that_leaves_cancels_upstream() -> None:
    """The engine's connection is closed, and the mirror forgets the request."""

    async def test() -> None:
        async with (
            raw_engine(STREAM + EVENTS[:60], EVENTS[60:]) as engine,
            mirror_of(engine.url, engine=told()) as mirrored,
        ):
            engine.pause = asyncio.Event()
            async with mirrored.client.stream("POST", "/v1/completions", json=ASK) as answer:
                pieces = answer.aiter_raw()  # kept, as its end would be the answer's
                await anext(pieces)
                await mirrored.until(lambda: len(mirrored.mirroring.proxy) == 1)
            await asyncio.wait_for(engine.gone.wait(), 30)
            await mirrored.until(lambda: len(mirrored.mirroring.proxy) == 0)
            assert mirrored.asked.sample("block_proxy_requests_total", path="/v1/completions", code="499") == 1

    run(test())


async def refusal(answer: httpx.Response, status: int) -> dict[str, object]:
    """The error object of an answer."""
    assert answer.status_code == status, answer.text
    error: dict[str, object] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def test_an_engine_that_is_not_there_is_unavailable() -> None:
    """Whatever is asked for, the answer is a 503 in OpenAI's shape that says when to try again."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]

    async def test() -> None:
        async with mirror_of(f"http://127.0.0.1:{port}", engine=told()) as mirrored:
            for answer in (await mirrored.complete(), await mirrored.client.get("/v1/models")):
                assert "cannot be reached" in str((await refusal(answer, 503))["message"])
                assert answer.headers["retry-after"]

    run(test())


@pytest.mark.parametrize(
    ("answers", "status"),
    [((b"",), 502), ((b"nonsense\r\n\r\n",), 502), ((whole(b"x" * 9)[:-3],), 502), ((b"HTTP/1.1 200 OK\r\n",), 502)],
)
def test_an_engine_that_breaks_off_has_failed(answers: tuple[bytes, ...], status: int) -> None:
    """An answer that is not whole is none."""

    async def test() -> None:
        async with raw_engine(*answers) as engine, mirror_of(engine.url, engine=told()) as mirrored:
            await refusal(await mirrored.complete(), status)

    run(test())


def test_an_engine_that_says_nothing_is_too_late() -> None:
    """After the longest silence that is borne the client is told."""

    async def test() -> None:
        async with raw_engine(b"", b"never") as engine, mirror_of(engine.url, engine=told(), idle_s=0.1) as mirrored:
            engine.pause = asyncio.Event()
            await refusal(await mirrored.complete(), 504)
            engine.pause.set()

    run(test())


def test_a_stream_that_breaks_ends_with_an_error_that_can_be_read() -> None:
    """Whole events first, then the error as the last event; no half of an event comes between."""
    chunked = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")
    first = EVENTS.partition(b"\n\n")[0] + b"\n\n"
    piece = first + b'data: {"choices":[{"ind'

    async def test() -> None:
        pieces = (chunked, b"%x\r\n%b\r\n" % (len(piece), piece))
        async with raw_engine(*pieces) as engine, mirror_of(engine.url, engine=told()) as mirrored:
            answer = await mirrored.client.post("/v1/completions", json=ASK)
            assert answer.content.startswith(first)
            last = answer.content.removeprefix(first)
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_failed"

    run(test())


def test_as_much_as_may_be_and_no_more() -> None:
    """Bodies and completions under way have limits, with the statuses that the gateway gives too."""

    async def test() -> None:
        async with raw_engine(STREAM, b"", EVENTS) as engine:
            engine.pause = asyncio.Event()
            limits = {"max_concurrency": 2, "max_body_bytes": 1000}
            async with mirror_of(engine.url, engine=told(), **limits) as mirrored:
                await refusal(await mirrored.complete(prompt="x" * 2000), 413)
                await refusal(await mirrored.client.post("/v1/other", content=b"x" * 2000), 413)
                held = [asyncio.create_task(mirrored.client.post("/v1/completions", json=ASK)) for _ in range(2)]
                await mirrored.until(lambda: len(engine.told) == 2)
                await refusal(await mirrored.complete(), 429)
                engine.pause.set()
                for one in held:
                    assert (await one).content == EVENTS

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
def test_a_body_that_makes_no_sense_is_the_engines_to_refuse(body: bytes, tmp_path: Path) -> None:
    """The client reads the engine's own words, and nothing is mirrored."""

    async def test(url: str) -> None:
        async with mirror_of(url, speed=200.0) as mirrored, httpx.AsyncClient(base_url=url) as direct:
            for path in ("/v1/completions", "/v1/chat/completions"):
                headers = {"content-type": "application/json"}
                through = await mirrored.client.post(path, content=body, headers=headers)
                straight = await direct.post(path, content=body, headers=headers)
                assert (through.status_code, through.content) == (straight.status_code, straight.content)
            await mirrored.asked.until(
                lambda answer: answer.indicators.num_running + answer.indicators.num_waiting == 0
            )

    with emulated(tmp_path, state_file="", speed=200.0) as engine:
        run(test(str(engine.client.base_url).rstrip("/")))


def test_an_end_lets_streams_finish_and_takes_nothing_new() -> None:
    """What is under way when the sidecar is told to stop goes on; what comes then is sent elsewhere."""

    async def leaving(engine: RawEngine) -> bytes:
        async with mirror_of(engine.url, engine=told(), drain_s=30.0) as mirrored:
            held = asyncio.create_task(streamed(str(mirrored.client.base_url).rstrip("/")))
            await mirrored.until(lambda: len(mirrored.mirroring.proxy) == 1)
            asyncio.get_running_loop().call_later(0.2, resume, engine)
        return await held

    def resume(engine: RawEngine) -> None:
        assert engine.pause is not None
        engine.pause.set()

    async def streamed(url: str) -> bytes:
        async with httpx.AsyncClient(timeout=30.0) as client:
            return (await client.post(f"{url}/v1/completions", json=ASK)).content

    async def test() -> None:
        async with raw_engine(STREAM, EVENTS[:60], EVENTS[60:]) as engine:
            engine.pause = asyncio.Event()
            assert await leaving(engine) == EVENTS

    run(test())
