"""The one place that opens gRPC channels and binds gRPC servers."""

from __future__ import annotations

import errno
import socket
from typing import cast

import grpc

from services.rpc.stub_channel import StubChannel
from services.security.certificates import Certificates
from services.security.own_key import NO_OWN_KEY, OwnKey

MAX_METADATA_BYTES = 16 * 2**10  # of a call; gRPC resets one with more by RESOURCE_EXHAUSTED
MAX_STREAMS = 4096  # of one connection at a time
HANDSHAKE_S = 10.0


def open_channel(
    address: str, key: OwnKey = NO_OWN_KEY, *, certificates: Certificates | None = None
) -> grpc.aio.Channel:
    """Open a channel to host:port for generated stubs; it connects when it is first used, and again after a failure.

    All calls are made with a key, if there is one.
    """
    return cast("grpc.aio.Channel", StubChannel(address, key=key, certificates=certificates))


def make_server(
    *,
    max_message_bytes: int,
    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = (),
    max_streams: int = MAX_STREAMS,
) -> grpc.aio.Server:
    """Make a server that listens nowhere yet; a client sends further calls once it has fewer than `max_streams`."""
    return grpc.aio.server(
        interceptors=interceptors,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.http2.bdp_probe", 0),  # messages are small: not worth a ping after each pause (scripts/bench_rpc.py)
            ("grpc.so_reuseport", 0),  # or a second server on this port would take half of the calls instead of failing
            ("grpc.keepalive_permit_without_calls", 1),
            # a client that sends pings more often than this loses its connection at the third
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 2),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ],
    )


def streams_for(max_concurrency: int) -> int:
    """Return how many streams a connection may have, so that calls beyond the limit are refused and do not wait."""
    return min(2**31 - 1, 2 * max_concurrency + 128)


def bind_server(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    *,
    field: str = "port",
) -> int:
    """Bind a server to an address, with TLS by `credentials`; ValueError names what is wrong.

    Port 0 takes any free port; `field` names the port's setting.
    """
    refuse_taken(host, port, field)  # gRPC would print its own lines about it
    name = f"[{host}]" if ":" in host else host
    try:
        if credentials is not None:
            return server.add_secure_port(f"{name}:{port}", credentials)
        return server.add_insecure_port(f"{name}:{port}")
    except RuntimeError:
        raise ValueError(f"host: {host} port {port} cannot be listened on") from None


def refuse_taken(host: str, port: int, field: str) -> None:
    """Raise ValueError where an address cannot be bound; `field` names the port's setting."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"host: {host!r} is no address of this machine") from None
    with socket.socket(family, kind, protocol) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(f"host: {host!r} is no address of this machine") from None
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise ValueError(f"{field}: {port} on {host} {reason}") from None
