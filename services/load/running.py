"""Open-loop sending: requests are sent when they are due, whether or not earlier ones have finished, and timed.

Latencies count from when a request was due, not from when it was sent, so that delays of an overloaded sender or server
are included. All times are in the endpoint's time, which may pass slower or faster than the wall clock
(`RequestFormat.time_scale`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated
from uuid import uuid4

from predictor.gain import count_on_time
from protos.block.v1 import common_pb2
from services.http.client import HttpClient
from services.http.connection import ConnectError, Connection
from services.http.headers import request_head
from services.http.origin import Origin
from services.http.sse import StreamReader
from services.load.request_format import RequestFormat, body_of, headers_of
from simulator.load_plan import Planned, slo_of
from simulator.load_report import SHED, RequestResult

ERROR_EVENT = b'data: {"error"'
UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
MAX_NOTE = 200  # characters of a server's error message
MAX_ERROR_BYTES = 64 * 1024
BUSY = 429
UNNAMED = "unnamed"  # reason of a server that names none
MAX_RETRIES = 100  # of a shed request


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """The limits of a load test."""

    timeout_s: Annotated[float, "Maximum time for one request, in seconds of wall time."] = 600.0
    max_in_flight: Annotated[
        int, "Maximum number of requests in progress; further requests wait, which counts as latency."
    ] = 1024
    retry_shed: Annotated[
        int,
        "Maximum number of times that a shed request is sent again, each after its `Retry-After`, as if it were due "
        "then; not where that is longer than the timeout.",
    ] = 0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        if not 0 < self.timeout_s < 1e6:
            raise ValueError(f"timeout_s: must be a time above 0, not {self.timeout_s}")
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: must be at least 1, not {self.max_in_flight}")
        if not 0 <= self.retry_shed <= MAX_RETRIES:
            raise ValueError(f"retry_shed: must lie between 0 and {MAX_RETRIES}, not {self.retry_shed}")


async def run_plan(
    plan: Sequence[Planned],
    origin: Origin,
    form: RequestFormat,
    limits: LoadLimits,
    on_end: Callable[[RequestResult], None],
) -> list[RequestResult]:
    """Send all requests when they are due; return their results when the last one has ended."""
    sender = LoadSender(origin, form, limits)
    in_flight = asyncio.Semaphore(limits.max_in_flight)
    results: list[RequestResult] = []
    start_s = time.monotonic()

    async def one(planned: Planned, body: bytes, due_s: float) -> None:
        result = RequestResult(plan=planned)
        results.append(result)
        async with in_flight:
            await sender.send(planned, body, due_s, result)
        while (after_s := _retry_in_s(result, limits, form.time_scale)) is not None:
            retry_s = time.monotonic() + after_s
            await asyncio.sleep(after_s)
            result.reset_for_retry((retry_s - due_s) * form.time_scale)
            async with in_flight:
                await sender.send(planned, body, retry_s, result)
        on_end(result)

    try:
        async with asyncio.TaskGroup() as tasks:
            for planned in sorted(plan, key=lambda planned: planned.due_s):
                body, due_s = body_of(planned, form), start_s + planned.due_s / form.time_scale
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(one(planned, body, due_s))
    finally:
        sender.close()
    return results


class LoadSender:
    """Sends requests in one format to one endpoint, and records the results."""

    def __init__(self, origin: Origin, form: RequestFormat, limits: LoadLimits) -> None:
        """Prepare; connections are opened when needed."""
        self._origin = origin
        self._form = form
        self._timeout_s = limits.timeout_s
        self._client = HttpClient(connect_s=min(5.0, limits.timeout_s), max_kept=limits.max_in_flight)
        self._run_id = uuid4().hex[:8]  # makes request ids unique to this run

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def send(self, planned: Planned, body: bytes, due_s: float, result: RequestResult) -> None:
        """Send a request that is due at a time of the monotonic clock; failures are recorded in the result."""
        sent_s = time.monotonic()
        due_s = min(due_s, sent_s)  # timers count whole milliseconds, and may fire early
        result.sent_s = (sent_s - due_s) * self._form.time_scale
        again = f"-again-{result.num_retries}" if result.num_retries else ""
        headers = headers_of(planned, self._form, f"{self._run_id}-{planned.request_id}{again}")
        head = request_head(b"POST", self._origin, self._form.target, headers, len(body))
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._client.send(self._origin, head, body, self._timeout_s)
                try:
                    await self._receive(connection, due_s, result)
                finally:
                    connection.release()
        except ConnectError as error:
            result.failure, result.note = "unreachable", str(error)
        except ConnectionError as error:
            result.failure, result.note = "broken", str(error)
        except TimeoutError:
            result.failure = "timeout"

    async def _receive(self, connection: Connection, due_s: float, result: RequestResult) -> None:
        scale = self._form.time_scale
        headers = dict(connection.headers)
        result.answered_s = (time.monotonic() - due_s) * scale
        result.instance = headers.get(b"x-block-instance", b"").decode("latin-1")
        result.predicted_ttft_s = _seconds(headers.get(b"x-block-predicted-ttft-ms"), scale)
        result.predicted_e2e_s = _seconds(headers.get(b"x-block-predicted-e2e-ms"), scale)
        result.decision_s = _seconds(headers.get(b"x-block-decision-ms"), 1.0)
        result.demoted = headers.get(b"x-block-demoted") == b"true"
        if connection.status != 200:
            text = await connection.read_all(self._timeout_s, MAX_ERROR_BYTES)
            result.failure, result.note = f"status {connection.status}", _note(text)
            if connection.status == BUSY and (after_s := _retry_after_s(headers, scale)) is not None:
                result.failure, result.retry_after_s = SHED, after_s
                result.shed_reason = headers.get(b"x-block-shed-reason", b"").decode("latin-1") or UNNAMED
            return
        stream = StreamReader()
        slo = slo_of(result.plan, self._form.slo)
        marks: list[tuple[int, float]] | None = None if slo.ttft_s is None else []
        first_s = last_s = 0.0

        def take(piece: bytes) -> None:
            nonlocal first_s, last_s
            if events := stream.feed(piece):
                last_s = connection.last_byte_s
                first_s = first_s or last_s
                if marks is not None:
                    marks.append((stream.num_data, (last_s - due_s) * scale))
                if ERROR_EVENT in events:
                    result.failure, result.note = "error event", _note(events[events.index(ERROR_EVENT) :])

        await connection.hand_over(take, self._timeout_s)
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
        if marks is not None:
            times = stream.token_times(marks, ending)
            result.tokens_on_time = count_on_time(slo, times, result.output_tokens)


def _retry_in_s(result: RequestResult, limits: LoadLimits, scale: float) -> float | None:
    """Return after how many seconds of wall time a request is sent again; None where it is not."""
    if result.failure != SHED or result.retry_after_s is None or result.num_retries >= limits.retry_shed:
        return None
    after_s = result.retry_after_s / scale
    return after_s if after_s <= limits.timeout_s else None


def _seconds(value: bytes | None, scale: float) -> float | None:
    try:
        return None if value is None else float(value) / 1000 * scale
    except ValueError:
        return None


def _retry_after_s(headers: Mapping[bytes, bytes], scale: float) -> float | None:
    """Read when a refused request may be sent again: exactly, else in whole seconds; None where it is not said."""
    exact_s = _seconds(headers.get(b"x-block-retry-after-ms"), scale)
    text = headers.get(b"retry-after", b"")
    return float(text) * scale if exact_s is None and text.isdigit() else exact_s


def _note(text: bytes) -> str:
    return " ".join(text.decode("utf-8", "replace").split())[:MAX_NOTE]
