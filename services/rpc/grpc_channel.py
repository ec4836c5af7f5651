"""A gRPC client over one HTTP/2 connection, for the calls that a placement waits for.

A stream's messages and its end are passed to functions, without a task per stream. Status codes, deadlines and
reconnecting are those of grpc.aio, which `tests/services/rpc/test_grpc_channel.py` compares it with. Messages are not
compressed.
"""

from __future__ import annotations

import asyncio
import random
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from scheduler.backoff import Backoff
from services.rpc.grpc_call import GrpcCall, Metadata, OnEnd, OnMessage, rpc_error
from services.rpc.http2 import Http2Connection
from services.rpc.http2_frames import LostError
from services.security.certificates import Certificates, own_certificates
from services.security.handshakes import reason_in
from services.security.own_key import NO_OWN_KEY, OwnKey

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0  # between two attempts to connect
KEEPALIVE_S = 20.0  # a server that sends nothing for so long is pinged, while calls are in progress
KEEPALIVE_TIMEOUT_S = 5.0
CLOSE_S = 0.5  # for a server to end its side of a connection with TLS
MAX_CALLS_UNSENT = 1000  # that wait for the first connection

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
