"""The audit log: one line for each operator's action and each refusal of one, never with a key."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial

from services.logs import log_event
from services.security.access_metrics import AccessMetrics
from services.security.token_bucket import TokenBucket
from services.supervised_task import supervised

log = logging.getLogger(__name__)
audit = logging.getLogger("block.audit")
audit.setLevel(logging.INFO)  # whatever else is logged

OK, REFUSED, FAILED = "ok", "refused", "failed"
MAX_WAITING = 1024  # lines for the file
MAX_REFUSALS_PER_MINUTE = 60  # written; a caller without a key must not fill the disk
LONGEST_TEXT = 200
FLUSH_S = 2.0
MODE = 0o600
FULL, RATE = "full", "rate"  # reasons for lost lines, as metrics name them


class AuditLog:
    """Writes lines to the logger `block.audit`, and to a file in the background, where one is set."""

    def __init__(
        self,
        path: str = "",
        metrics: AccessMetrics | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Write nothing yet; a file that cannot be opened is a ValueError."""
        self._path = path
        self._metrics = metrics
        self._clock, self._wall_clock = clock, wall_clock
        self._refusals = TokenBucket(capacity=MAX_REFUSALS_PER_MINUTE, per_s=MAX_REFUSALS_PER_MINUTE / 60)
        self._waiting: deque[str] = deque()
        self._has_lines = asyncio.Event()
        self._is_failing = False
        if path:
            try:
                self._append("")
            except OSError as error:
                raise ValueError(f"audit_log: {path} cannot be written: {error.strerror}") from None

    def record(  # noqa: PLR0913 - the fields of a line
        self, event: str, *, actor: str, role: str, peer: str, subject: str, result: str, reason: str = ""
    ) -> None:
        """Write a line; it waits for nothing."""
        if result == REFUSED:
            now_s = self._clock()
            if self._refusals.wait_s(1, now_s):
                self._lost(RATE)
                return
            self._refusals.take(1, now_s)
        fields = {"actor": actor or "-", "role": str(role), "peer": peer, "object": subject or "-", "result": result}
        if reason:
            fields["reason"] = reason
        fields = {name: value[:LONGEST_TEXT] for name, value in fields.items()}
        log_event(audit, logging.INFO, event, **fields)
        if not self._path:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._lost(FULL)
            return
        at = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._waiting.append(json.dumps({"time": at, "event": event, **fields}))
        self._has_lines.set()

    async def write_lines(self) -> None:
        """Write lines to the file as they come, until cancelled."""
        while True:
            await self._has_lines.wait()
            await self._write()

    async def flush(self) -> None:
        """Write the lines that wait."""
        if self._waiting:
            await self._write()

    async def _write(self) -> None:
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._has_lines.clear()
        try:
            await asyncio.to_thread(self._append, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            self._lost(FAILED, len(lines))
            if not self._is_failing:
                log_event(log, logging.ERROR, "audit log cannot be written", file=self._path, reason=error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def _append(self, text: str) -> None:
        """Append to the file, which is opened each time, so that it may be rotated."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)

    def _lost(self, reason: str, num: int = 1) -> None:
        if self._metrics is not None:
            self._metrics.audit_lost.labels(reason).inc(num)


NO_AUDIT = AuditLog()


@asynccontextmanager
async def auditing(path: str, metrics: AccessMetrics) -> AsyncIterator[AuditLog]:
    """Write an audit log while the block runs; then write what waits, within a bounded time."""
    log_of_process = AuditLog(path, metrics)
    writing = asyncio.create_task(supervised("audit log", partial(log_of_process.write_lines)))
    try:
        yield log_of_process
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        with suppress(TimeoutError):
            await asyncio.wait_for(log_of_process.flush(), FLUSH_S)
