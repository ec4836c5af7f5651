"""HTTP sockets, and uvicorn without its signals: requests under way may finish at shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import uvicorn

from services.http.application import Application
from services.http.guarded_protocol import ConnectionGuard, GuardedProtocol
from services.http.limits import ConnectionTable
from services.rpc.channels import refuse_taken

BACKLOG = 2048
KEEP_ALIVE_S = 75  # of clients' idle connections
SETTLE_S = 2  # from cancelling the requests under way to closing their connections


@asynccontextmanager
async def answering(  # noqa: PLR0913 - what any of our servers may need
    app: Application,
    listener: socket.socket,
    drain_s: float,
    *,
    protocol: type[GuardedProtocol] = GuardedProtocol,
    keep_alive_s: int = KEEP_ALIVE_S,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[None]:
    """Serve an application on a bound socket while the block runs; then let requests finish, at most `drain_s`.

    Without `tls` it is plain HTTP.
    """
    guard = ConnectionGuard(
        limits=app.limits, refusals=app.refusals, connections=ConnectionTable(app.limits), error=app.error
    )
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(protocol, guard)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # or a header could set a client's address
        backlog=BACKLOG,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=math.ceil(drain_s) + SETTLE_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config.load()
    http = uvicorn.Server(config)
    http.lifespan = config.lifespan_class(config)
    await http.startup(sockets=[] if tls else [listener])
    if tls:  # uvicorn would give a handshake 60 s, and connections count for the limits only after it
        loop = asyncio.get_running_loop()
        connected = partial(protocol, guard, config=config, server_state=http.server_state, app_state={})
        server = await loop.create_server(
            connected, sock=listener, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=app.limits.header_s
        )
        http.servers.append(server)
    ticking = asyncio.create_task(http.main_loop())
    try:
        yield
    finally:
        app.draining = True
        too_late = asyncio.get_running_loop().call_later(drain_s, app.cut_off)
        ticking.cancel()
        await http.shutdown(sockets=[listener])
        too_late.cancel()


def listening(host: str, port: int, field: str = "port") -> socket.socket:
    """Bind a socket; ValueError names what is wrong. It accepts connections once it is served."""
    refuse_taken(host, port, field)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
    listener.bind(address)
    listener.setblocking(False)
    return listener
