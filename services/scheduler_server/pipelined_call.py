"""Calls of one method of a node over one long-lived stream: half the processor time of a call for each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from protos.block.v1 import predictor_pb2

PREDICTOR = predictor_pb2.DESCRIPTOR.services_by_name["Predictor"].full_name


@dataclass(slots=True, eq=False)
class _Waiting:
    """A question without an answer."""

    question: bytes
    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self, answer: bytes) -> None:
        """Give the answer, if anybody still wants it."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # who asked may have stopped waiting, and that is no fault to be told of


class PipelinedCall:
    """Answers each question in its turn. The stream is opened by the first one, and again after it ended.

    Serialised messages go in and out. A server may end the stream whenever it likes, as it does when it restarts, when
    it refuses one of the questions, or when it does not know the method: whatever is unanswered then is asked once
    more, each by a call of its own, and what comes of that call is its answer.
    """

    def __init__(self, channel: grpc.aio.Channel, method: str, deadline_s: float) -> None:
        """Open nothing yet."""
        self._open: Any = channel.stream_stream(f"/{PREDICTOR}/{method}Stream")
        self._ask_alone: Any = channel.unary_unary(f"/{PREDICTOR}/{method}")
        self._deadline_s = deadline_s
        self._can_stream = True  # as long as nothing else is known
        self._has_ended = False
        self._stream: Any = None
        self._unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, question: bytes) -> asyncio.Future[bytes]:
        """Send a question; the future becomes its answer, or the error that stands for it."""
        waiting = _Waiting(question)
        if self._has_ended:
            waiting.fail(ConnectionError("has left the list"))
            return waiting.answer
        if not self._can_stream:
            self._start(self._answer_alone(waiting))
            return waiting.answer
        if self._stream is None:
            self._unsent = asyncio.Queue()
            self._stream = self._open(_each(self._unsent))
            self._start(self._read(self._stream))
        self._waiting.append(waiting)
        self._unsent.put_nowait(question)
        return waiting.answer

    def hang_up(self) -> None:
        """End the stream; who still waits for an answer gets none."""
        if self._stream is not None:
            self._stream.cancel()
            for waiting in self._closed():
                waiting.fail(ConnectionError("hung up"))

    def refuse(self) -> None:
        """Take nothing new."""
        self._has_ended = True

    async def close(self) -> None:
        """Take nothing new, give what was asked the time it has for an answer, and end."""
        self.refuse()
        if self._waiting:
            await asyncio.wait([waiting.answer for waiting in self._waiting], timeout=self._deadline_s)
        if self._tasks and self._stream is None:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)
        self.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, stream: Any) -> None:
        """Hand out the answers of one stream until it ends."""
        try:
            while (answer := await stream.read()) is not grpc.aio.EOF and stream is self._stream:
                if not self._waiting:
                    stream.cancel()  # it answers what nobody has asked
                    break
                self._waiting.popleft().succeed(cast("bytes", answer))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._can_stream = False
        except asyncio.CancelledError:
            if stream is self._stream:
                raise
        if stream is self._stream:
            for waiting in self._closed():
                self._start(self._answer_alone(waiting))

    async def _answer_alone(self, waiting: _Waiting) -> None:
        """Ask by a call."""
        if waiting.answer.done():
            return
        try:
            waiting.succeed(await self._ask_alone(waiting.question, timeout=self._deadline_s))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._can_stream = True  # another may come in its place
            waiting.fail(error)
        except asyncio.CancelledError:
            waiting.fail(ConnectionError("hung up"))
            raise

    def _closed(self) -> deque[_Waiting]:
        """Let the stream go; give those who wait."""
        self._stream = None
        self._unsent.put_nowait(None)
        waiting, self._waiting = self._waiting, deque()
        return waiting


async def _each(unsent: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (question := await unsent.get()) is not None:
        yield question
