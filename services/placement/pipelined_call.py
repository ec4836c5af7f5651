"""Calls of one unary method over one long-lived stream, which takes half the processor time of a call each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.block.v1 import predictor_pb2
from services.instances.instance import REMOVED_FROM_LIST
from services.rpc.grpc_call import GrpcCall
from services.rpc.grpc_channel import GrpcChannel

PREDICTOR = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name
MAX_WAITING = 1000  # requests without a reply
STALLED_DEADLINES, MIN_STALLED_S = 3, 1.0  # a stream whose oldest request has waited for so long is given up


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request without a reply."""

    request: bytes
    sent_s: float
    reply: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self, reply: bytes) -> None:
        """Set the reply, unless the caller gave up."""
        if not self.reply.done():
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        """Set an error instead of a reply."""
        if not self.reply.done():
            self.reply.set_exception(error)
            self.reply.exception()  # mark it as retrieved: the caller may have stopped waiting


class PipelinedCall:
    """Sends requests on a stream and matches replies in their order; the first request after an end opens a new stream.

    Serialised messages go in and out. A server may end the stream at any time: when it restarts, when it refuses one
    of the requests, or when it does not know the method. Requests without a reply are then sent once more, as unary
    calls. A stream that no longer replies is cancelled.
    """

    def __init__(self, channel: GrpcChannel, method: str, deadline_s: float) -> None:
        """Prepare calls of a method of the Predictor service; the stream opens with the first one."""
        self._channel = channel
        self._path = f"/{PREDICTOR}/{method}"
        self._deadline_s = deadline_s
        self._stalled_s = max(MIN_STALLED_S, STALLED_DEADLINES * deadline_s)
        self._can_stream = True  # until the server says that it cannot
        self._has_ended = False
        self._stream: GrpcCall | None = None
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request; the future becomes its reply, or the error of the call."""
        now_s = self._loop.time()
        waiting = _Waiting(request, now_s)
        if self._has_ended:
            waiting.fail(ConnectionError(REMOVED_FROM_LIST))
            return waiting.reply
        if self._waiting and now_s - self._waiting[0].sent_s > self._stalled_s:
            self.cancel()
        if len(self._waiting) + len(self._tasks) >= MAX_WAITING:
            waiting.fail(ConnectionError(f"{MAX_WAITING} calls wait for a reply"))
            return waiting.reply
        if not self._can_stream:
            self._start(self._call_alone(waiting))
            return waiting.reply
        if self._stream is None:
            self._stream = self._channel.start_call(f"{self._path}Stream", self._take_reply, self._take_end)
        self._waiting.append(waiting)
        self._stream.send(request)
        return waiting.reply

    def cancel(self) -> None:
        """End the stream; requests without a reply fail."""
        if self._stream is not None:
            self._stream.cancel()
            for waiting in self._closed():
                waiting.fail(ConnectionError("stream cancelled"))

    def stop(self) -> None:
        """Accept no more requests."""
        self._has_ended = True

    async def close(self) -> None:
        """Accept no more requests, give those in flight until their deadline, and end."""
        self.stop()
        if self._waiting:
            await asyncio.wait([waiting.reply for waiting in self._waiting], timeout=self._deadline_s)
        if self._tasks and self._stream is None:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)
        self.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take_reply(self, reply: bytes) -> None:
        if not self._waiting:
            raise ValueError("a reply without a request")  # ends the stream
        self._waiting.popleft().succeed(reply)

    def _take_end(self, error: Exception | None) -> None:
        """Call alone for the requests without a reply."""
        if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            self._can_stream = False
        for waiting in self._closed():
            self._start(self._call_alone(waiting))

    async def _call_alone(self, waiting: _Waiting) -> None:
        """Make a unary call."""
        if waiting.reply.done():
            return
        try:
            waiting.succeed(await self._channel.unary(self._path, waiting.request, timeout_s=self._deadline_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._can_stream = True  # another server may take its place
            waiting.fail(error)
        except asyncio.CancelledError:
            waiting.fail(ConnectionError("stream cancelled"))
            raise

    def _closed(self) -> deque[_Waiting]:
        """Drop the stream; return the requests without a reply."""
        self._stream = None
        waiting, self._waiting = self._waiting, deque()
        return waiting
