"""Tokens written straight to a connection: a turn of the event loop for each costs more than the token itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "block.connection"


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which lets the application have the connection too."""

    def on_message_begin(self) -> None:
        """Add the connection to what the application is told."""
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"protocol": self}}


def connection_of(scope: Mapping[str, Any]) -> HttpToolsProtocol:
    """Find the connection that a request came by."""
    found: HttpToolsProtocol = scope["extensions"][EXTENSION]["protocol"]
    return found


def write_chunk(connection: HttpToolsProtocol, data: bytes) -> bool:
    """Write a piece of an answer that has begun without a length, unless the client is behind with reading, or gone."""
    if connection.flow.write_paused or connection.transport.is_closing():
        return False
    connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True
