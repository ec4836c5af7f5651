"""A gRPC channel for generated stubs, over `grpc_channel.py`: the calls that no placement waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from services.rpc.grpc_call import GrpcCall, Metadata, rpc_error
from services.rpc.grpc_channel import GrpcChannel

MAX_UNREAD = 10_000  # unread replies of a stream

Write: TypeAlias = Callable[[Any], bytes]
Read: TypeAlias = Callable[[bytes], Any]


class StubChannel(GrpcChannel):
    """Makes the calls of a generated stub, with the names and the errors of grpc.aio."""

    def unary_unary(
        self, path: str, request_serializer: Write, response_deserializer: Read, _registered_method: bool = False
    ) -> Callable[..., Awaitable[Any]]:
        """Make a method that takes a request and returns the reply."""

        async def call(request: Any, timeout: float | None = None, metadata: Metadata = ()) -> Any:  # noqa: ASYNC109
            raw = await self.unary(path, request_serializer(request), timeout_s=timeout, metadata=metadata)
            return _parsed(raw, response_deserializer)

        return call

    def unary_stream(
        self, path: str, request_serializer: Write, response_deserializer: Read, _registered_method: bool = False
    ) -> Callable[..., AsyncIterator[Any]]:
        """Make a method that takes a request and yields replies."""
        exchange = self.stream_stream(path, request_serializer, response_deserializer)

        def call(request: Any, **options: Any) -> AsyncIterator[Any]:
            return exchange(_only(request), **options)

        return call

    def stream_unary(
        self, path: str, request_serializer: Write, response_deserializer: Read, _registered_method: bool = False
    ) -> Callable[..., Awaitable[Any]]:
        """Make a method that takes requests and returns the reply."""
        exchange = self.stream_stream(path, request_serializer, response_deserializer)

        async def call(requests: AsyncIterable[Any], **options: Any) -> Any:
            replies = [reply async for reply in exchange(requests, **options)]
            if len(replies) != 1:
                raise rpc_error(grpc.StatusCode.INTERNAL, f"{len(replies)} replies to one call")
            return replies[0]

        return call

    def stream_stream(
        self, path: str, request_serializer: Write, response_deserializer: Read, _registered_method: bool = False
    ) -> Callable[..., AsyncIterator[Any]]:
        """Make a method that takes requests and yields replies."""

        async def call(
            requests: AsyncIterable[Any],
            timeout: float | None = None,  # noqa: ASYNC109
            metadata: Metadata = (),
        ) -> AsyncIterator[Any]:
            unread: asyncio.Queue[bytes | None] = asyncio.Queue()
            errors: list[BaseException] = []

            def take(message: bytes) -> None:
                if unread.qsize() >= MAX_UNREAD:
                    raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_UNREAD} replies are unread")
                unread.put_nowait(message)

            def end(error: BaseException | None) -> None:
                if error is not None:
                    errors.append(error)
                unread.put_nowait(None)

            def sent(done: asyncio.Task[None]) -> None:
                if not done.cancelled() and (error := done.exception()) is not None:
                    end(error)

            started = self.start_call(path, take, end, timeout_s=timeout, metadata=metadata)
            sending = asyncio.create_task(_send_all(started, requests, request_serializer))
            sending.add_done_callback(sent)
            try:
                while (raw := await unread.get()) is not None:
                    yield _parsed(raw, response_deserializer)
                if errors:
                    raise errors[0]
            finally:
                started.cancel()
                sending.cancel()
                await asyncio.wait([sending])

        return call


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


async def _send_all(call: GrpcCall, requests: AsyncIterable[Any], write: Write) -> None:
    async for request in requests:
        call.send(write(request))
    call.end_requests()


def _parsed(raw: bytes, read: Read) -> Any:
    try:
        return read(raw)
    except DecodeError:
        raise rpc_error(grpc.StatusCode.INTERNAL, "a reply that is no message of its type") from None
