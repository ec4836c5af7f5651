"""An HTTP engine that completes requests in no time, and replies to other paths as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def scripted_engine(replies: Mapping[str, Any], *, status: int = 404) -> AsyncIterator[str]:
    """Serve on a free port while the block runs; paths without a reply get `status`. Yields the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, path, _ = head.split(" ", 2)
            length = int(head.lower().partition("content-length:")[2].split("\r\n")[0] or 0)
            sent = json.loads(await reader.readexactly(length)) if length else {}
            code, body = (200, replies[path]) if path in replies else (status, "")
            if path == "/v1/completions":
                code, body = 200, completion(sent)
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            await asyncio.sleep(0.01)
            writer.write(
                f"HTTP/1.1 {code} X\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data
            )
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def completion(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a completion of as many tokens as the request allows."""
    num = sent.get("max_tokens", 16)
    usage = {"prompt_tokens": 5, "completion_tokens": num, "total_tokens": 5 + num}
    return {"choices": [{"index": 0, "text": "x " * num, "finish_reason": "length"}], "usage": usage}
