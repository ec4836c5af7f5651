"""A gRPC channel for generated stubs, over `grpc_channel.py`: the calls that no placement waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from services.rpc.grpc_channel import GrpcChannel, Metadata, rpc_error

MAX_UNREAD = 10_000  # replies of a stream that nobody has read yet

Write: TypeAlias = Callable[[Any], bytes]
Read: TypeAlias = Callable[[bytes], Any]


class StubChannel(GrpcChannel):
    """Makes the calls of a generated stub, with the names and the errors of grpc.aio."""

    def unary_unary(
        self,
        path: str,
        request_serializer: Write,
        response_deserializer: Read,
        _registered_method: bool = False,
    ) -> Callable[..., Awaitable[Any]]:
        """Make a method that takes a request and returns the reply."""

        async def call(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:  # noqa: ASYNC109
            raw = await self.unary(path, request_serializer(request), timeout_s=timeout, metadata=metadata)
            return _parsed(raw, response_deserializer)

        return call

    def unary_stream(
        self,
        path: str,
        request_serializer: Write,
        response_deserializer: Read,
        _registered_method: bool = False,
    ) -> Callable[..., AsyncIterator[Any]]:
        """Make a method that takes a request and yields replies."""

        async def call(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> AsyncIterator[Any]:  # noqa: ASYNC109
            unread: asyncio.Queue[bytes | None] = asyncio.Queue()
            errors: list[Exception] = []

            def take(message: bytes) -> None:
                if unread.qsize() >= MAX_UNREAD:
                    raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_UNREAD} replies are unread")
                unread.put_nowait(message)

            def end(error: Exception | None) -> None:
                if error is not None:
                    errors.append(error)
                unread.put_nowait(None)

            started = self.start_call(path, take, end, timeout_s=timeout, metadata=metadata)
            started.send(request_serializer(request), last=True)
            try:
                while (raw := await unread.get()) is not None:
                    yield _parsed(raw, response_deserializer)
                if errors:
                    raise errors[0]
            finally:
                started.cancel()

        return call

    def stream_unary(
        self,
        path: str,
        request_serializer: Write,
        response_deserializer: Read,
        _registered_method: bool = False,
    ) -> Callable[..., Awaitable[Any]]:
        """Make a method that takes requests and returns the reply."""

        async def call(
            requests: AsyncIterable[Any],
            timeout: float | None = None,  # noqa: ASYNC109
            metadata: Metadata = (),
        ) -> Any:
            replies: list[bytes] = []
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def end(error: Exception | None) -> None:
                if not done.done():
                    done.set_result(None) if error is None else done.set_exception(error)

            started = self.start_call(path, replies.append, end, timeout_s=timeout, metadata=metadata)

            async def send_all() -> None:
                async for request in requests:
                    started.send(request_serializer(request))
                started.end_requests()

            sending = asyncio.create_task(send_all())
            try:
                await asyncio.wait([sending, done], return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                    raise error
                await done
                if len(replies) != 1:
                    raise rpc_error(grpc.StatusCode.INTERNAL, f"{len(replies)} replies to one call")
                return _parsed(replies[0], response_deserializer)
            finally:
                started.cancel()
                sending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await sending

        return call


def _parsed(raw: bytes, read: Read) -> Any:
    try:
        return read(raw)
    except DecodeError:
        raise rpc_error(grpc.StatusCode.INTERNAL, "a reply that is no message of its type") from None
