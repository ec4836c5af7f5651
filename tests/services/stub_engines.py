"""Stub engines that stream what a test sets, over HTTP on free ports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.services.kv_transfer_replies import held_params

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(slots=True, kw_only=True)
class StubEngine:
    """Replies to every request with the same pieces; `status`, `breaks_after` and `hold` are its faults."""

    pieces: list[str] = field(default_factory=lambda: ["Once", " upon", " a time"])
    status: int = 200
    breaks_after: int | None = None  # number of pieces
    hold: asyncio.Event | None = None
    hold_at: int = 1  # index of the piece before which it waits
    raw_events: list[bytes] | None = None
    prefilled: dict[str, Any] = field(default_factory=dict)  # what replies to prefill legs have instead
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                if not await self.answer(reader, writer):
                    break
        writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reply to one request; return False if the connection is to end."""
        if self.status != 200:
            body = json.dumps({"error": {"message": "by the test", "code": self.status}}).encode()
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(body), body))
            return True
        if (self.bodies[-1].get("kv_transfer_params") or {}).get("do_remote_decode"):
            if self.breaks_after == 0 or (self.hold_at == 0 and not await self._held(reader)):
                return False
            reply = json.dumps({"kv_transfer_params": self.params(len(self.bodies)), **self.prefilled}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(reply), reply))
            return True
        writer.write(CHUNKED)
        for index, event in enumerate(self.events()):
            if index == self.breaks_after:
                return False
            if index == self.hold_at and not await self._held(reader):
                return False
            data = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    async def _held(self, reader: asyncio.StreamReader) -> bool:
        """Wait while `hold` says so; return False if the other side leaves meanwhile."""
        if self.hold is None:
            return True
        held, gone = asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([held, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            held.cancel()
        if gone.done():
            self.left.set()
            return False
        gone.cancel()
        await asyncio.wait([gone])
        return True

    @staticmethod
    def params(num: int) -> dict[str, Any]:
        """Return what the reply to a prefill leg, the engine's request number `num`, names."""
        return held_params(num, remote_prefill_cached_tokens=2)

    def events(self) -> list[bytes]:
        """Return all events of a stream."""
        if self.raw_events is not None:
            return self.raw_events
        chat = "messages" in self.bodies[-1]
        choices: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": ""}}] if chat else []
        choices += [{"delta": {"content": piece}} if chat else {"text": piece} for piece in self.pieces]
        choices[-1]["finish_reason"] = "length"
        usage = {
            "prompt_tokens": 7,
            "completion_tokens": len(self.pieces),
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        chunks = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]
        return [json.dumps(one).encode() for one in chunks] + [b"[DONE]"]


@asynccontextmanager
async def engines(number: int) -> AsyncIterator[list[StubEngine]]:
    """Serve stub engines, each on its own port."""
    stubs = [StubEngine() for _ in range(number)]
    servers = []
    for stub in stubs:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        servers.append(server)
    try:
        yield stubs
    finally:
        for server in servers:
            server.close()
