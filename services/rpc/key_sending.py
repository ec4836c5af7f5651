"""Interceptors of channels that add a key to the metadata of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.security.own_key import OwnKey


class BlockingKeySender(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a key to the calls of a command that has no event loop."""

    def __init__(self, key: OwnKey) -> None:
        """Add this key."""
        self._key = key

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Add the key to a call."""
        return continuation(_BlockingDetails(details, self._key), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Add the key to a call."""
        return continuation(_BlockingDetails(details, self._key), request)


class _BlockingDetails(grpc.ClientCallDetails):
    """What a call has, and the key."""

    def __init__(self, details: Any, key: OwnKey) -> None:
        self.method, self.timeout = details.method, details.timeout
        self.credentials, self.wait_for_ready = details.credentials, details.wait_for_ready
        self.compression = details.compression
        self.metadata = (*(details.metadata or ()), *key.metadata())


def key_senders(key: OwnKey) -> Sequence[grpc.aio.ClientInterceptor]:
    """Return the interceptors that add a key to all kinds of calls; none without a key."""
    return (_UnaryUnary(key), _UnaryStream(key), _StreamUnary(key)) if key else ()


class _Sender:
    def __init__(self, key: OwnKey) -> None:
        self._key = key

    def with_key(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._key.metadata())
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryUnary(_Sender, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self.with_key(client_call_details), request)


class _UnaryStream(_Sender, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self.with_key(client_call_details), request)


class _StreamUnary(_Sender, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self.with_key(client_call_details), request_iterator)
