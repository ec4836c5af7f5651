"""envoy.service.ext_proc.v3.ExternalProcessor over gRPC: a stream for each HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.envoy.v3 import external_processor_pb2 as wire
from protos.envoy.v3 import external_processor_pb2_grpc
from services.endpoint_picker.exchange import Exchange
from services.endpoint_picker.messages import immediate
from services.endpoint_picker.picking import SATURATED, DroppedError, Picker
from services.http.errors import ApiError
from services.logs import log_event

log = logging.getLogger(__name__)

PROTOCOL, INTERNAL = "protocol", "internal"  # why a stream ends in an error, as metrics name it


class ExternalProcessorService(external_processor_pb2_grpc.ExternalProcessorServicer):
    """Answers the messages of each stream in turn; `len` is the number of streams."""

    def __init__(self, picker: Picker, max_streams: int) -> None:
        """Choose by a picker; requests beyond the limit are dropped."""
        self._picker = picker
        self._max_streams = max_streams
        self._num = 0
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        """Return the number of streams."""
        return self._num

    async def none_left(self) -> None:
        """Wait until no stream is open."""
        await self._none_left.wait()

    async def Process(  # noqa: N802 - the wire names it
        self,
        request_iterator: AsyncIterator[wire.ProcessingRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[wire.ProcessingResponse]:
        """Process one HTTP request and its response."""
        if self._num >= self._max_streams:
            async for _ in request_iterator:
                yield self._too_many()
                return
            return
        self._num += 1
        self._none_left.clear()
        exchange = Exchange(self._picker)
        try:
            async for message in request_iterator:
                responses = exchange.receive(message)
                for response in await exchange.place() if responses is None else responses:
                    yield response
        except ValueError as error:
            self._picker.metrics.stream_errors.labels(PROTOCOL).inc()
            log_event(log, logging.WARNING, "stream of the proxy refused", why=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            self._picker.metrics.stream_errors.labels(INTERNAL).inc()
            raise
        finally:
            self._num -= 1
            if not self._num:
                self._none_left.set()
            exchange.close()

    def _too_many(self) -> wire.ProcessingResponse:
        error = DroppedError(ApiError(429, f"{self._max_streams} requests are under way; retry later"), SATURATED)
        self._picker.metrics.refused.labels(str(error.status), error.reason).inc()
        return immediate(error.status, error.headers(), error.body(), "endpoint_picker")
