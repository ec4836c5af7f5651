"""One gRPC call over an HTTP/2 stream: its messages, its deadline, and the status that it ends with."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import grpc
from hpack import Encoder, NeverIndexedHeaderTuple

from services.rpc.http2 import Headers, Http2Connection, Http2Stream
from services.rpc.http2_frames import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INADEQUATE_SECURITY,
    REFUSED_STREAM,
    Http2Error,
    LostError,
)
from services.security.own_key import OwnKey

MAX_MESSAGE_BYTES = 4 * 2**20  # of a reply
UNREPORTED = (b":", b"grpc-", b"content-type")  # headers after a status that are no metadata

PREFIX = struct.Struct(">BL")  # whether the message is compressed, and its length
STATUSES = {code.value[0]: code for code in grpc.StatusCode}
STATUS_OF_HTTP = {
    400: grpc.StatusCode.INTERNAL,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.UNAVAILABLE,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.UNAVAILABLE,
}
STATUS_OF_HTTP2 = {
    REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    CANCEL: grpc.StatusCode.CANCELLED,
    ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}

Metadata = Sequence[tuple[str, str]]  # of a request
OnMessage = Callable[[bytes], None]
OnEnd = Callable[[Exception | None], None]


class CallingChannel(Protocol):
    """What a call needs of its channel."""

    address: str
    key: OwnKey
    scheme: str

    def forget(self, call: GrpcCall) -> None:
        """Drop a call that has ended."""


class GrpcCall:
    """One call of a channel, on a stream of its connection; it may wait for the connection."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a call is made of
        self,
        channel: CallingChannel,
        path: str,
        on_message: OnMessage,
        on_end: OnEnd,
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        """Wait for a connection, and limit the call by its deadline."""
        self._channel = channel
        self._path = path
        self._on_message = on_message
        self._on_end: OnEnd | None = on_end  # until it is called
        self._timeout_s = timeout_s
        self._request_metadata = metadata
        self._connection: Http2Connection | None = None
        self._stream: Http2Stream | None = None
        self._unsent: list[tuple[bytes, bool]] = []  # while there is no connection
        self._partial = bytearray()  # of a message that has not arrived whole
        self._has_headers = False
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._metadata: tuple[tuple[str, str], ...] = ()  # after the status
        self._deadline: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(
                max(0.0, timeout_s), self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            )

    def send(self, message: bytes, *, last: bool = False) -> None:
        """Send a message, the last one of this call perhaps. After the call's end, nothing is sent."""
        data = PREFIX.pack(0, len(message)) + message
        if self._stream is None or self._connection is None:
            if self._on_end is not None:
                self._unsent.append((data, last))
        else:
            self._send(data, last)

    def end_requests(self) -> None:
        """Say that no further message follows."""
        if self._stream is not None:
            self._send(b"", last=True)
        elif self._on_end is not None:
            self._unsent.append((b"", True))

    def cancel(self) -> None:
        """End the call, if it has not ended, without a call of `on_end`."""
        if self._on_end is not None:
            self._finish()
            self._reset()

    # For the channel and the connection.

    def start(self, connection: Http2Connection) -> None:
        """Send what was to be sent."""
        if self._on_end is None:
            return
        headers = header_block(self._path, self._channel.address, self._channel.scheme)
        if self._timeout_s is not None:
            headers += _timeout_header(self._timeout_s)
        if self._request_metadata:
            headers += _compressed(*self._request_metadata)
        if metadata := self._channel.key.metadata():
            headers += _compressed(*metadata)
        try:
            self._stream = connection.open_stream(headers, self)
        except Http2Error as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if connection.is_open else grpc.StatusCode.UNAVAILABLE
            self.fail_soon(code, str(error))
            return
        self._connection = connection
        unsent, self._unsent = self._unsent, []
        for data, last in unsent:
            self._send(data, last)

    def fail_soon(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with an error after what runs now."""
        asyncio.get_running_loop().call_soon(self.fail, code, details)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with an error."""
        self._fail(rpc_error(code, details))

    def headers_received(self, headers: Headers) -> None:
        """Take headers or trailers."""
        fields = dict(headers)
        if not self._has_headers:
            self._has_headers = True
            status, kind = fields.get(b":status", b""), fields.get(b"content-type", b"")
            if not kind.startswith(b"application/grpc") or status != b"200":
                code = STATUS_OF_HTTP.get(int(status) if status.isdigit() else 0, grpc.StatusCode.UNKNOWN)
                self.fail(code, f"HTTP status {status.decode('latin-1')}, which is no gRPC response")
                return
        if (number := fields.get(b"grpc-status")) is not None:
            code = STATUSES.get(int(number), grpc.StatusCode.UNKNOWN) if number.isdigit() else grpc.StatusCode.UNKNOWN
            self._status = code, unquote(fields.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
            if code is not grpc.StatusCode.OK:
                self._metadata = tuple(
                    (name.decode("latin-1"), value.decode("latin-1"))
                    for name, value in headers
                    if not name.startswith(UNREPORTED) and not name.endswith(b"-bin")
                )

    def data_received(self, data: bytes) -> None:
        """Pass on the messages in it."""
        partial = self._partial
        if not self._has_headers:
            self.fail(grpc.StatusCode.INTERNAL, "data before headers")
            return
        if partial:
            partial += data
            if len(partial) < PREFIX.size or len(partial) < PREFIX.size + PREFIX.unpack_from(partial)[1]:
                self._check(partial)
                return
            data = bytes(partial)
            partial.clear()
        start, size = 0, len(data)
        while size - start >= PREFIX.size:
            is_compressed, length = PREFIX.unpack_from(data, start)
            end = start + PREFIX.size + length
            if is_compressed or length > MAX_MESSAGE_BYTES:
                self._check(data[start : start + PREFIX.size])
                return
            if end > size:
                break
            try:
                self._on_message(data[start + PREFIX.size : end])
            except Exception as error:  # noqa: BLE001 - the call ends with it
                self._fail(error)
            if self._on_end is None:
                return
            start = end
        if start < size:
            partial += data[start:]

    def stream_closed(self, error: Http2Error | None) -> None:
        """End the call as the stream has ended."""
        self._stream = None
        if self._status is not None:
            code, details = self._status
            if code is grpc.StatusCode.OK and self._partial:
                code, details = grpc.StatusCode.INTERNAL, "the last message is incomplete"
            self._fail(None if code is grpc.StatusCode.OK else rpc_error(code, details, self._metadata))
        elif isinstance(error, LostError):
            self.fail(grpc.StatusCode.UNAVAILABLE, str(error))
        elif error is not None:
            self.fail(STATUS_OF_HTTP2.get(error.code, grpc.StatusCode.INTERNAL), str(error))
        else:
            self.fail(grpc.StatusCode.UNKNOWN, "the server ended the call without a status")

    def _send(self, data: bytes, last: bool) -> None:
        assert self._connection is not None
        assert self._stream is not None
        try:
            self._connection.send(self._stream, data, end=last)
        except Http2Error as error:
            self.fail_soon(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    def _check(self, prefix: bytes | bytearray) -> None:
        """End a call whose next message cannot be received."""
        if len(prefix) < PREFIX.size:
            return
        is_compressed, length = PREFIX.unpack_from(prefix)
        if is_compressed:
            self.fail(grpc.StatusCode.INTERNAL, "a compressed message, which was not asked for")
        elif length > MAX_MESSAGE_BYTES:
            self.fail(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {length} bytes, and at most {MAX_MESSAGE_BYTES} pass"
            )

    def _fail(self, error: Exception | None) -> None:
        on_end = self._on_end
        if on_end is not None:
            self._finish()
            self._reset()
            on_end(error)

    def _finish(self) -> None:
        self._on_end = None
        self._unsent.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        self._channel.forget(self)

    def _reset(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and self._connection is not None:
            self._connection.reset(stream)


@lru_cache(maxsize=4096)
def header_block(path: str, authority: str, scheme: str = "http") -> bytes:
    """Return the compressed headers that all calls of a method have; none of them enters the server's table."""
    return _compressed(
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "block"),
        ("grpc-accept-encoding", "identity"),
    )


def _timeout_header(timeout_s: float) -> bytes:
    return _compressed(("grpc-timeout", f"{min(99_999_999, max(1, math.ceil(timeout_s * 1e3)))}m"))


def _compressed(*headers: tuple[str, str]) -> bytes:
    return bytes(Encoder().encode([NeverIndexedHeaderTuple(*one) for one in headers], huffman=False))


def rpc_error(code: grpc.StatusCode, details: str, metadata: Sequence[tuple[str, str]] = ()) -> grpc.aio.AioRpcError:
    """Return the error that grpc.aio raises for a status and its trailing metadata."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)
