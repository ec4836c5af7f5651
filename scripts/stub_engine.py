"""A stub of an engine for benches: it serves the wire protocol of `vllm serve`, and computes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import cast

import httptools

from scripts.bench_requests import MODEL, NUM_EVENTS, PLACE
from services.http.paths import COMPLETIONS
from services.security.certificates import Certificates

NUM_BLOCKS = 1024  # that a prefill leg leaves
TOKEN_BYTES = 4


class StubEngine(asyncio.Protocol):
    """Responds to every completion with a stream of events, at the pace that the request has.

    A prefill leg gets the reply of an engine that holds the KV blocks of a long prompt. Other requests of routers get
    the responses of `vllm serve` with default flags: health, models, metrics, and the tokens of a prompt, one for each
    four characters.
    """

    def __init__(self) -> None:
        """Start without a connection."""
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse the data."""
        self._parser.feed_data(data)

    def on_url(self, target: bytes) -> None:
        """Collect the target."""
        self._target += target

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Start the response."""
        target, body = self._target, self._body
        self._target = self._body = b""
        if target != COMPLETIONS:
            self._transport.write(small_answer(target, body))
            return
        if PREFILL_LEG in body:
            self._transport.write(PREFILLED)
            return
        _, first_ms, gap_ms, _ = body[body.rindex(b"pace") :].split(b" ", 3)
        if first_ms == b"0":
            self._transport.write(HEAD + b"".join(EVENTS))
        else:
            self._later(0, int(first_ms) / 1000, int(gap_ms) / 1000)

    def _later(self, number: int, pause_s: float, gap_s: float) -> None:
        asyncio.get_running_loop().call_later(pause_s, self._event, number, gap_s)

    def _event(self, number: int, gap_s: float) -> None:
        self._transport.write(EVENTS[number] if number else HEAD + EVENTS[0])
        if number + 1 < NUM_EVENTS:
            self._later(number + 1, gap_s, gap_s)
        else:
            self._transport.write(EVENTS[-1])


def small_answer(target: bytes, body: bytes) -> bytes:
    """Respond to a request that is no completion; 404 for what `vllm serve` does not serve by default."""
    kind, text = b"application/json", b""
    if target == b"/tokenize":
        tokens = tokens_of(json.loads(body)["prompt"].encode())
        text = json.dumps({"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}).encode()
    elif target == b"/v1/models":
        text = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}).encode()
    elif target == b"/metrics":
        kind, text = b"text/plain; version=0.0.4", METRICS
    elif target != b"/health":
        return b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n" + NOT_FOUND
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(text), text)


def tokens_of(prompt: bytes) -> list[int]:
    """Make a token of each four characters; prompts with the same prefix have tokens with the same prefix."""
    halves = memoryview(prompt + bytes(-len(prompt) % TOKEN_BYTES)).cast("H")
    return halves.tolist()[::2]


def chunk(text: bytes) -> bytes:
    """Frame a piece of a body."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def events() -> Iterator[bytes]:
    """Write a stream as vLLM does."""
    for number in range(NUM_EVENTS):
        reason = '"length"' if number == NUM_EVENTS - 1 else "null"
        choice = f'{{"index":0,"text":" token{number}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}'
        head = f'{{"id":"cmpl-bench","object":"text_completion","created":1,"model":"{MODEL}"'
        yield chunk(f'data: {head},"choices":[{choice}]}}\n\n'.encode())
    yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


NOT_FOUND = b'{"detail":"Not Found"}'
METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="bench"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="bench"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="bench"} 0.25
"""
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENTS = tuple(events())


def prefilled() -> bytes:
    """Write the reply to a prefill leg as vLLM does."""
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(range(NUM_BLOCKS))],
        "remote_engine_id": "2b7c", "remote_request_id": "cmpl-bench-0-1", "remote_host": PLACE, "remote_port": 5600,
        "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 16 * NUM_BLOCKS,
        "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
    }  # fmt: skip
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    text = json.dumps({"id": "cmpl-bench", "model": MODEL, "choices": [choice], "kv_transfer_params": params}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)


PREFILL_LEG = b'"do_remote_decode":true'
PREFILLED = prefilled()


async def serve_engine(certificates: Certificates) -> None:
    """Serve as an engine."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StubEngine, PLACE, 0, ssl=certificates.server_context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
