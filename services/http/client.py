"""A small HTTP/1.1 client: persistent connections, bodies as they arrive, a timeout for every wait.

It supports what inference engines need: GET and POST with bodies of a known length; responses with a length, in chunks,
or up to the end of the connection. It takes a quarter of the processor time of aiohttp (23 against 96 µs a request).
`tests/services/http/test_client_against_h11.py` compares it with h11.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from services.http.connection import BrokenError, ConnectError, Connection
from services.http.headers import Headers, request_head
from services.http.origin import Origin
from services.security.certificates import own_certificates
from services.security.handshakes import reason_in


class HttpClient:
    """Connections to any number of servers, kept for later requests."""

    def __init__(
        self,
        *,
        connect_s: float = 2.0,
        keep_s: float = 4.0,
        max_kept: int = 512,
        tls: ssl.SSLContext | None = None,
        authorization: Callable[[], bytes] | None = None,
    ) -> None:
        """Keep at most `max_kept` idle connections per server, for less time than servers usually do (5 s).

        `tls` says which certificates servers may have, by default as this process's settings do; `authorization` gives
        a header line that is added to every request.
        """
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._max_kept = max_kept
        self._idle: dict[Origin, list[Connection]] = {}
        self._tls = tls
        self._authorization = authorization

    @property
    def sends_key(self) -> bool:
        """Return whether it adds an API key of its own to every request."""
        return self._authorization is not None

    async def send(self, origin: Origin, head: bytes, body: bytes, first_s: float) -> Connection:
        """Send a request; return when the head of the response has arrived, at most `first_s` later.

        A kept connection that the server has closed in the meantime is replaced by a new one.
        """
        if self._authorization is not None:
            head = head[:-2] + self._authorization() + b"\r\n"
        while (connection := self._kept(origin)) is not None:
            try:
                return await _sent(connection, head, body, first_s)
            except BrokenError:
                if connection.has_received:
                    raise
        return await _sent(await self._connect(origin), head, body, first_s)

    async def get(
        self,
        origin: Origin,
        target: bytes,
        *,
        within_s: float,
        headers: Headers | None = None,
        max_bytes: int = 2**20,
    ) -> tuple[int, bytes]:
        """Get a small body; `within_s` limits the whole exchange."""
        async with asyncio.timeout(within_s):
            head = request_head(b"GET", origin, target, headers or [], 0)
            connection = await self.send(origin, head, b"", within_s)
            try:
                return connection.status, await connection.read_all(within_s, max_bytes)
            finally:
                connection.release()

    def close(self) -> None:
        """Close the idle connections."""
        for connections in self._idle.values():
            for connection in list(connections):
                connection.abort()
        self._idle.clear()

    def _kept(self, origin: Origin) -> Connection | None:
        connections = self._idle.get(origin)
        if not connections:
            return None
        oldest_s = asyncio.get_running_loop().time() - self._keep_s
        while connections:
            connection = connections.pop()
            if connection.idle_since_s > oldest_s and not connection.is_closing():
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        if origin.scheme == "https" and self._tls is None:
            self._tls = own_certificates().http_context
        try:
            async with asyncio.timeout(self._connect_s):
                transport, connection = await loop.create_connection(
                    lambda: Connection(self, origin, loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.scheme == "https" else None,
                )
        except TimeoutError:
            raise ConnectError(
                f"{origin.host}:{origin.port} did not accept a connection within {self._connect_s:g} s"
            ) from None
        except (OSError, UnicodeError) as error:
            raise ConnectError(f"{origin.host}:{origin.port} cannot be reached: {reason_in(error)}") from None
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def keep(self, connection: Connection) -> None:
        """Keep a connection whose response has been read to its end."""
        connections = self._idle.setdefault(connection.origin, [])
        if len(connections) >= self._max_kept:
            connection.abort()
        else:
            connections.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that the server has closed."""
        connections = self._idle.get(connection.origin)
        if connections and connection in connections:
            connections.remove(connection)


async def _sent(connection: Connection, head: bytes, body: bytes, first_s: float) -> Connection:
    try:
        connection.write(head, body)
        await connection.head(first_s)
    except BaseException:
        connection.abort()
        raise
    return connection
