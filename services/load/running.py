"""Sending requests when they are due, whatever became of those before, and timing what comes back.

Latencies count from when a request was due, not from when it could be sent: where the sender or the server falls
behind, that shows. (Counting from the sending would leave out just the moments when things go badly.) All times are
those of the endpoint, which may run slower or faster than the clock on the wall (`Manner.time_scale`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from protos.block.v1 import common_pb2
from services.http.client import ConnectError, Connection, HttpClient, Origin, request_head
from services.http.sse import StreamReader
from services.load.asking import Manner, body_of, headers_of
from simulator.load_plan import Planned

ERROR_EVENT = b'data: {"error"'
UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
LONGEST_NOTE = 200  # characters of what a server says
MOST_ERROR_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """How much is borne."""

    timeout_s: float = 600.0  # for one request, from its sending, by the clock on the wall
    max_in_flight: int = 1024  # beyond, requests wait, and their clocks run

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 < self.timeout_s < 1e6:
            raise ValueError(f"timeout_s: must be a time above 0, not {self.timeout_s}")
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: must be at least 1, not {self.max_in_flight}")


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What became of a request. Times are seconds from when it was due; None where it never got there."""

    plan: Planned
    sent_s: float = 0.0  # how late it was sent
    ttft_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    failure: str | None = None  # the kind
    note: str = ""  # what the server said of it
    instance: str = ""
    predicted_ttft_s: float | None = None  # from the decision on
    predicted_e2e_s: float | None = None
    decision_s: float | None = None  # by the clock on the wall


async def run_plan(
    plan: Sequence[Planned], origin: Origin, manner: Manner, limits: LoadLimits, ended: Callable[[RequestResult], None]
) -> list[RequestResult]:
    """Send everything, each when it is due; return when the last has ended."""
    sender = LoadSender(origin, manner, limits)
    room = asyncio.Semaphore(limits.max_in_flight)
    results: list[RequestResult] = []
    start_s = time.monotonic()

    async def one(planned: Planned, body: bytes, due_s: float) -> None:
        result = RequestResult(plan=planned)
        results.append(result)
        async with room:
            await sender.send(planned, body, due_s, result)
        ended(result)

    try:
        async with asyncio.TaskGroup() as tasks:
            for planned in sorted(plan, key=lambda planned: planned.due_s):
                body, due_s = body_of(planned, manner), start_s + planned.due_s / manner.time_scale
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(one(planned, body, due_s))
    finally:
        sender.close()
    return results


class LoadSender:
    """Sends to one endpoint, in one manner, and writes down what comes back."""

    def __init__(self, origin: Origin, manner: Manner, limits: LoadLimits) -> None:
        """Open nothing yet."""
        self._origin = origin
        self._manner = manner
        self._within_s = limits.timeout_s
        self._client = HttpClient(connect_s=min(5.0, limits.timeout_s), max_kept=limits.max_in_flight)
        self._run_id = uuid4().hex[:8]  # two runs of one plan have different requests

    def close(self) -> None:
        """Close what is open."""
        self._client.close()

    async def send(self, planned: Planned, body: bytes, due_s: float, result: RequestResult) -> None:
        """Send a request that is, or was, due at that time on the wall; whatever goes wrong is a result."""
        result.sent_s = (time.monotonic() - due_s) * self._manner.time_scale
        headers = headers_of(planned, self._manner, f"{self._run_id}-{planned.request_id}")
        head = request_head(b"POST", self._origin, self._manner.target, headers, len(body))
        try:
            async with asyncio.timeout(self._within_s):
                connection = await self._client.send(self._origin, head, body, self._within_s)
                try:
                    await self._answered(connection, due_s, result)
                finally:
                    connection.release()
        except ConnectError as error:
            result.failure, result.note = "unreachable", str(error)
        except ConnectionError as error:
            result.failure, result.note = "broken", str(error)
        except TimeoutError:
            result.failure = "timeout"

    async def _answered(self, connection: Connection, due_s: float, result: RequestResult) -> None:
        scale = self._manner.time_scale
        headers = dict(connection.headers)
        result.instance = headers.get(b"x-block-instance", b"").decode("latin-1")
        result.predicted_ttft_s = _seconds(headers.get(b"x-block-predicted-ttft-ms"), scale)
        result.predicted_e2e_s = _seconds(headers.get(b"x-block-predicted-e2e-ms"), scale)
        result.decision_s = _seconds(headers.get(b"x-block-decision-ms"), 1.0)
        if connection.status != 200:
            text = await connection.read_all(self._within_s, MOST_ERROR_BYTES)
            result.failure, result.note = f"status {connection.status}", _note(text)
            return
        stream = StreamReader()
        first_s = last_s = 0.0

        def take(piece: bytes) -> None:
            nonlocal first_s, last_s
            if events := stream.feed(piece):
                last_s = connection.last_byte_s
                first_s = first_s or last_s
                if ERROR_EVENT in events:
                    result.failure, result.note = "error event", _note(events[events.index(ERROR_EVENT) :])

        await connection.hand_over(take, self._within_s)
        stream.rest()
        ending = stream.ending()
        result.output_tokens = ending.output_tokens
        if result.failure is None and not result.output_tokens:
            result.failure = "empty"
        elif result.failure is None and ending.finish_reason == UNFINISHED:
            result.failure = "cut short"
        if first_s:
            result.ttft_s, result.e2e_s = (first_s - due_s) * scale, (last_s - due_s) * scale
            if result.output_tokens > 1:
                result.tpot_s = (last_s - first_s) * scale / (result.output_tokens - 1)


def _seconds(value: bytes | None, scale: float) -> float | None:
    try:
        return None if value is None else float(value) / 1000 * scale
    except ValueError:
        return None


def _note(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:LONGEST_NOTE]
