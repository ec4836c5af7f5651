"""A target that replies as a hostile engine does: what a gateway reads from it, and what its client then gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random

from scripts.fuzzing.http_bytes import in_pieces
from scripts.fuzzing.http_stubs import END_S, gateway_before
from scripts.fuzzing.inputs import any_json, document, mutated, written
from scripts.fuzzing.targets import FoundError, require
from services.gateway.app import Gateway
from services.http.sse import StreamReader, data_of, ending_of
from services.http.stream_continuation import NotContinuableError, StreamTranscript
from tests.services.gateway.stubs import LOCAL

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models")
BODIES = (
    b'{"model": "tiny", "prompt": "Say hello", "max_tokens": 4, "stream": %s}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": %s}',
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n"
EVENT_STREAM, JSON = b"text/event-stream", b"application/json"


def event_of(draw: Random) -> bytes:
    """Draw an event of a stream."""
    kind = draw.randrange(12)
    if kind == 0:
        return b"data: [DONE]\n\n"
    if kind == 1:
        return b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
    if kind == 2:
        return b'data: {"error": {"message": "out of memory"}}\n\n'
    if kind == 3:
        return draw.choice((b": comment\n\n", b"event: x\n", b"\n\n", b"data:\n\n", b"data: null\n\n", b"data: []\n\n"))
    if kind == 4:
        return b"data: " + written(draw, any_json(draw)) + b"\n\n"
    choice = document(
        draw,
        {
            "index": lambda _: 0,
            "finish_reason": lambda d: d.choice((None, None, None, "stop", "length", "abort", "error")),
        },
        {
            "text": lambda _: "ab",
            "delta": lambda d: document(
                d, {}, {"role": lambda _: "assistant", "content": lambda _: "x", "reasoning": any_json}
            ),
            "token_ids": lambda d: d.choice(([1], [1, 2], any_json(d))),
            "prompt_token_ids": lambda d: d.choice(([1, 2, 3], any_json(d))),
            "logprobs": any_json,
        },
        wrong=0.08,
    )
    made = {"id": "cmpl-1", "model": "tiny", "created": 1, "choices": [choice]}
    end = draw.choice((b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n"))
    return b"data: " + written(draw, made) + end


class EngineReplyTarget:
    """Has an engine reply with the input, and then close the connection."""

    name = "sse"

    def __init__(self, gateway: Gateway) -> None:
        """Ask a gateway whose only engine replies with `reply`."""
        self._gateway = gateway
        self.reply = b""
        self.how = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to one request."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            await reader.readexactly(int(length.partition(b":")[2]))
            for piece in in_pieces(self.reply, self.how):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def drawn(self, draw: Random) -> bytes:
        """Draw a reply: which request it is to, how it is cut, its head, and its body."""
        path = draw.choice((0, 0, 0, 1, 1, 1, 2))
        streams = draw.random() < 0.8
        if path == 2:
            models = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
            body = written(draw, any_json(draw) if draw.random() < 0.5 else {**models, "data": [any_json(draw)]})
        elif streams:
            body = b"".join(event_of(draw) for _ in range(draw.randrange(1, 6)))
        else:
            body = written(draw, {"choices": any_json(draw), "usage": any_json(draw)})
        if draw.random() < 0.2:
            body = mutated(draw, body)
        kind = EVENT_STREAM if streams and path < 2 else JSON
        if draw.random() < 0.5:
            head = HEAD % (kind, b"content-length: %d\r\n" % len(body))
        elif draw.random() < 0.5:
            head = HEAD % (kind, b"transfer-encoding: chunked\r\n")
            body = (
                b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in in_pieces(body, draw.randrange(130, 256)))
                + b"0\r\n\r\n"
            )
        else:
            head = HEAD % (kind, b"")
        if draw.random() < 0.1:
            head = mutated(draw, head)
        if draw.random() < 0.1:
            head = head.replace(
                b"200 OK", b"%d X" % draw.choice((100, 101, 204, 206, 301, 304, 400, 429, 500, 503, 600, 999))
            )
        return bytes((path | (streams << 2), draw.randrange(256))) + head + body

    async def put(self, data: bytes) -> None:
        """Have the engine reply, and read what the client gets."""
        if len(data) < 2:
            return
        path, streams, self.how, self.reply = PATHS[data[0] % 4 % 3], bool(data[0] & 4), data[1], data[2:]
        _read_alone(self.reply.partition(b"\r\n\r\n")[2], self.how, chat=path == PATHS[1])
        self._gateway._context.models._until_s = 0.0  # noqa: SLF001 - ask the engine again
        body = b"" if path == PATHS[2] else BODIES[PATHS.index(path)] % (b"true" if streams else b"false")
        status, sent, is_whole = 0, bytearray(), False
        given = [body]
        gone = asyncio.Event()

        async def receive() -> dict[str, object]:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = int(str(message["status"]))
            else:
                sent.extend(bytes(message["body"]))  # type: ignore[call-overload]
                is_whole = not message.get("more_body", False)

        method = "GET" if path == PATHS[2] else "POST"
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [],
            "client": (LOCAL, 1),
        }
        try:
            async with asyncio.timeout(END_S):
                await self._gateway(scope, receive, send)  # type: ignore[arg-type]
        except TimeoutError:
            raise FoundError("the client's request does not end") from None
        require(is_whole, f"a reply without an end, status {status}")
        require(b"internal error" not in sent, "an internal error")
        require(len(self._gateway) == 0, "a request is under way")

    async def audit(self) -> None:
        """Have the engine reply properly."""
        event = b'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        await self.put(b"\x04\x00" + HEAD % (EVENT_STREAM, b"content-length: %d\r\n" % len(event)) + event)
        require(not self._gateway._request_ids, "ids of requests are left")  # noqa: SLF001


def _read_alone(events: bytes, how: int, *, chat: bool) -> None:
    """Read a stream as the gateway does, without a connection, and continue it."""
    body = (BODIES[1] if chat else BODIES[0]) % b"true"
    reader, transcript = (
        StreamReader(),
        StreamTranscript(body=body, chat=chat, hides_ids=how % 2 == 0, max_model_len=100),
    )
    whole = b""
    with suppress(NotContinuableError):
        for number, piece in enumerate(in_pieces(events, how)):
            found = reader.feed(piece)
            whole += found
            if found:
                transcript.passed(found)
            if number == how % 7:
                transcript.continue_as(transcript.continuation())
        transcript.end()
        transcript.passed(reader.rest())
    require(events.startswith(whole), "a stream that is changed by cutting it into events")
    reader.ending()
    reader.is_cut()
    ending_of(events)
    list(data_of(events))


@asynccontextmanager
async def open_sse(_: Path) -> AsyncIterator[EngineReplyTarget]:
    """Run a gateway before an engine that replies with inputs."""
    holder: list[EngineReplyTarget] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await holder[0].serve(reader, writer)

    async with AsyncExitStack() as stack:
        engine = await asyncio.start_server(serve, LOCAL, 0)
        stack.callback(engine.close)
        url = f"http://{LOCAL}:{engine.sockets[0].getsockname()[1]}"
        gateway = await stack.enter_async_context(gateway_before(url, first_byte_s=5.0, idle_s=5.0, answer_s=5.0))
        target = EngineReplyTarget(gateway)
        holder.append(target)
        yield target
