"""Questions to one sidecar over one long-lived stream: half the processor time of a call for each."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import grpc

PREDICT_STREAM = "/block.v1.Predictor/PredictStream"


class Line:
    """A stream that answers each question in its turn; it is opened by the first one, and again after it broke."""

    def __init__(self, channel: grpc.aio.Channel, method: str) -> None:
        """Open nothing yet."""
        self.works: bool | None = None  # None: nobody knows yet whether the other side can do it
        self._open: Any = channel.stream_stream(method)
        self._call: Any = None
        self._unsent: deque[bytes] = deque()
        self._unanswered: deque[asyncio.Future[bytes]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = False

    def ask(self, question: bytes) -> asyncio.Future[bytes]:
        """Send a question; the future becomes its answer, or the error that the stream ended in."""
        if self._call is None:
            self._call = self._open()
            self._start(self._read(self._call))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        self._unsent.append(question)
        if not self._writing:
            self._writing = True
            self._start(self._write(self._call))
        return answer

    def hang_up(self) -> None:
        """End the stream; who still waits for an answer gets none."""
        if self._call is not None:
            self._call.cancel()
            self._end(ConnectionError("hung up"))

    async def close(self) -> None:
        """End the stream, and see its tasks end."""
        self.hang_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, call: Any) -> None:
        try:
            while self._unsent and call is self._call:
                await call.write(self._unsent.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # whoever reads hears of it as well
        finally:
            if call is self._call:
                self._writing = False

    async def _read(self, call: Any) -> None:
        error: Exception
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                if call is not self._call:
                    return
                if not self._unanswered:
                    error = ConnectionError("answered what nobody had asked")
                    call.cancel()
                    break
                self.works = True
                waiting = self._unanswered.popleft()
                if not waiting.done():
                    waiting.set_result(cast("bytes", answer))
            else:
                error = ConnectionError("ended the stream")
        except grpc.aio.AioRpcError as failed:
            error = failed
            if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
                self.works = False
        except asyncio.CancelledError:
            error = ConnectionError("hung up")
        if call is self._call:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._call = None
        self._writing = False
        self._unsent.clear()
        unanswered, self._unanswered = self._unanswered, deque()
        for waiting in unanswered:
            if not waiting.done():
                waiting.set_exception(error)
