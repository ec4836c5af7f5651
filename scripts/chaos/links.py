"""A link between two parts that can fail: a TCP proxy with delay, limited bandwidth, stalls and resets."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

HOST = "127.0.0.1"
CHUNK_BYTES = 16 * 1024
MAX_CHUNKS = 64  # under way in one direction of a connection
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCondition:
    """How a link is: its delay in each direction, its bandwidth for each connection, and whether nothing passes."""

    delay_s: float = 0.0
    bytes_per_s: float = math.inf
    stalled: bool = False


HEALTHY = LinkCondition()


class FailingLink:
    """Listens on a port of its own, and passes each connection on to the port that its target has at that time."""

    def __init__(self, target_port: Callable[[], int]) -> None:
        """Pass connections on once it is started."""
        self.port = 0
        self.condition = HEALTHY
        self._target_port = target_port
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connected, HOST, 0, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        self.reset()

    def set(self, condition: LinkCondition) -> None:
        """Change the condition, also of connections that exist."""
        self.condition = condition
        (self._flows.clear if condition.stalled else self._flows.set)()

    def reset(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            _reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            back, upstream = await asyncio.open_connection(HOST, self._target_port(), limit=CHUNK_BYTES)
            self._writers.add(upstream)
            await asyncio.gather(self._passed(reader, upstream), self._passed(back, writer))
        except OSError:
            for one in (writer, upstream):
                if one is not None:
                    _reset(one)
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._writers.discard(one)
                    one.close()

    async def _passed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, each piece after the delay that the link has when it comes."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        sending = asyncio.create_task(self._sent(pieces, writer))
        now_s = asyncio.get_running_loop().time
        try:
            while True:
                piece = await reader.read(CHUNK_BYTES)
                await pieces.put((now_s() + self.condition.delay_s, piece))
                if not piece:
                    break
            await sending
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _sent(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            due_s, piece = await pieces.get()
            if (left_s := due_s - now_s()) > 0:
                await asyncio.sleep(left_s)
            await self._flows.wait()
            if not piece:
                with suppress(OSError):
                    writer.write_eof()
                return
            if self.condition.bytes_per_s < math.inf:
                await asyncio.sleep(len(piece) / self.condition.bytes_per_s)
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    if own is not None:
        with suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
