"""A gRPC client over one HTTP/2 connection, for the calls that a placement waits for.

A stream's messages and its end are passed to functions, without a task per stream. Status codes, deadlines and
reconnecting are those of grpc.aio, which `tests/services/rpc/test_grpc_channel.py` compares it with. Messages are not
compressed.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message
from hpack import Encoder, NeverIndexedHeaderTuple

from scheduler.backoff import Backoff
from services.rpc.http2 import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    INADEQUATE_SECURITY,
    REFUSED_STREAM,
    Headers,
    Http2Connection,
    Http2Error,
    Http2Stream,
    LostError,
)
from services.security.certificates import Certificates, own_certificates
from services.security.handshakes import reason_in
from services.security.own_key import NO_OWN_KEY, OwnKey

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0  # between two attempts to connect
KEEPALIVE_S = 20.0  # a server that sends nothing for so long is pinged, while calls are in progress
KEEPALIVE_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 4 * 2**20  # of a reply
UNREPORTED = (b":", b"grpc-", b"content-type")  # headers after a status that are no metadata
CLOSE_S = 0.5  # for a server to end its side of a connection with TLS
MAX_CALLS_UNSENT = 1000  # that wait for the first connection

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
Response = TypeVar("Response", bound=Message)


class GrpcChannel:
    """A channel to host:port. It connects with the first call, and again after a failure, with pauses that grow.

    While the first attempt is made, calls wait; after a failure they fail at once, until a connection is there.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_s: float = 1.0,
        key: OwnKey = NO_OWN_KEY,
        certificates: Certificates | None = None,
    ) -> None:
        """Connect to nothing yet; `connect_s` limits one attempt, and all calls show `key`, if there is one.

        By default this process's certificates are used.
        """
        self.address = address
        self.key = key
        self._certificates = certificates or own_certificates()
        self._tls = self._certificates.rpc_context
        self.scheme = "http" if self._tls is None else "https"
        self._connect_s = connect_s
        self._connection: Http2Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._failure = ""  # of the last attempt to connect
        self._waiting: list[GrpcCall] = []
        self._calls: set[GrpcCall] = set()
        self._backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S, jitter=0.2, random=random.random)
        self._keepalive: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Use it as a context, which closes it."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()

    def start_call(
        self,
        path: str,
        on_message: OnMessage,
        on_end: OnEnd,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> GrpcCall:
        """Start a call; messages are sent with its `send`.

        `on_message` gets each reply. `on_end` is called once, and never from within this function or `send`: with
        None after status OK, an AioRpcError after another one, or with the error that `on_message` raised.
        """
        call = GrpcCall(self, path, on_message, on_end, timeout_s, metadata)
        self._calls.add(call)
        if self._is_closed:
            call.fail_soon(grpc.StatusCode.CANCELLED, "the channel is closed")
        elif self._connection is not None:
            call.start(self._connection)
        elif self._failure:
            call.fail_soon(grpc.StatusCode.UNAVAILABLE, self._failure)
        elif len(self._waiting) >= MAX_CALLS_UNSENT:
            call.fail_soon(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_CALLS_UNSENT} calls wait for a connection")
        else:
            self._waiting.append(call)
        self._connect()
        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return whether there is a connection, by the names that grpc has for it."""
        if try_to_connect:
            self._connect()
        if self._is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self._connection is not None:
            return grpc.ChannelConnectivity.READY
        if self._failure:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.IDLE if self._connecting is None else grpc.ChannelConnectivity.CONNECTING

    async def close(self) -> None:
        """End all calls, and the connection."""
        self._is_closed = True
        for call in list(self._calls):
            call.fail(grpc.StatusCode.CANCELLED, "the channel is closed")
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            connection = self._connection
            connection.abort("the channel is closed")
            await connection.closed(CLOSE_S)

    # Calls that a task waits for.

    async def call(
        self, path: str, request: Message, response: type[Response], *, timeout_s: float, metadata: Metadata = ()
    ) -> Response:
        """Send a request, and return the reply."""
        raw = await self.unary(path, request.SerializeToString(), timeout_s=timeout_s, metadata=metadata)
        try:
            return response.FromString(raw)
        except DecodeError:
            raise rpc_error(grpc.StatusCode.INTERNAL, f"the reply is no {response.__name__}") from None

    async def follow(self, path: str, request: bytes, on_message: OnMessage) -> None:
        """Send a request, and pass on replies until the call ends; raise its error, or that of `on_message`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        call = self.start_call(path, on_message, end)
        call.send(request, last=True)
        try:
            await done
        finally:
            call.cancel()

    async def unary(
        self, path: str, request: bytes, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> bytes:
        """Send a serialised request, and return the serialised reply."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replies: list[bytes] = []

        def end(error: Exception | None) -> None:
            if done.done():
                return
            if error is None and len(replies) != 1:
                error = rpc_error(grpc.StatusCode.INTERNAL, f"{len(replies)} replies to one request")
            done.set_result(None) if error is None else done.set_exception(error)

        call = self.start_call(path, replies.append, end, timeout_s=timeout_s, metadata=metadata)
        call.send(request, last=True)
        try:
            await done
        finally:
            call.cancel()
        return replies[0]

    # The connection.

    def _connect(self) -> None:
        if self._connection is None and self._connecting is None and not self._is_closed:
            self._connecting = asyncio.get_running_loop().create_task(self._connect_until_ready())

    async def _connect_until_ready(self) -> None:
        """Try to connect until it succeeds."""
        try:
            while True:
                try:
                    await self._attempt()
                except Exception as error:  # noqa: BLE001 - of any address: the calls that wait have to end
                    self._failure = f"{self.address} cannot be reached: {reason_in(error)}"
                else:
                    return
                waiting, self._waiting = self._waiting, []
                for call in waiting:
                    call.fail(grpc.StatusCode.UNAVAILABLE, self._failure)
                await asyncio.sleep(self._backoff.next_s())
        finally:
            self._connecting = None

    async def _attempt(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        def set_end(reason: str) -> None:
            if not ready.done():
                ready.set_exception(LostError(reason))
            self._lost(connection)

        connection = Http2Connection(set_ready, set_end)
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(lambda: connection, host.strip("[]"), int(port), ssl=self._tls)
                try:
                    await ready
                except LostError as error:  # gRPC's servers close without an alert
                    raise LostError(self._certificates.lost_after_handshake(str(error))) from None
            if not connection.is_open:
                raise LostError("the server closes its connections")
        except TimeoutError:
            connection.abort("no settings in time")
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from None
        except BaseException:
            connection.abort("connecting was stopped")
            raise
        finally:
            if ready.done() and not ready.cancelled():
                ready.exception()  # mark it as retrieved
        self._connection, self._failure = connection, ""
        self._backoff.reset()
        self._keepalive = loop.call_later(KEEPALIVE_S, self._keep_alive, connection)
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.start(connection)

    def _lost(self, connection: Http2Connection) -> None:
        """Use a connection no more; its calls end by themselves."""
        if self._connection is connection:
            self._connection = None
            if self._keepalive is not None:
                self._keepalive.cancel()

    def _keep_alive(self, connection: Http2Connection) -> None:
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - connection.received_s
        if silent_s < KEEPALIVE_S:
            self._keepalive = loop.call_later(KEEPALIVE_S - silent_s, self._keep_alive, connection)
        elif not connection.num_streams():
            self._keepalive = loop.call_later(KEEPALIVE_S, self._keep_alive, connection)
        else:
            connection.ping()
            self._keepalive = loop.call_later(KEEPALIVE_TIMEOUT_S, self._require_alive, connection, loop.time())

    def _require_alive(self, connection: Http2Connection, asked_s: float) -> None:
        if connection.received_s < asked_s:
            connection.abort(f"{self.address} does not answer a ping within {KEEPALIVE_TIMEOUT_S:g} s")
        else:
            self._keepalive = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keep_alive, connection)

    def forget(self, call: GrpcCall) -> None:
        """Drop a call that has ended."""
        self._calls.discard(call)
        if call in self._waiting:
            self._waiting.remove(call)


class GrpcCall:
    """One call, made by `GrpcChannel.start_call`."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a call is made of
        self,
        channel: GrpcChannel,
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
            except Exception as error:  # noqa: BLE001 - the caller's, to whom it is passed
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
