"""Whether an engine runs: by its /health, by the end of its steps, and by the requests that reach it."""

from __future__ import annotations

import asyncio
import logging

from predictor.engine_view import EngineView
from protos.block.v1 import common_pb2
from scheduler.circuit import CircuitState
from services.http.client import HttpClient
from services.http.engine_client import engine_client
from services.http.origin import Origin, origin_of
from services.logs import log_event
from services.predictor_server.engine_source import DownError

log = logging.getLogger(__name__)

FAILURES = 2  # failed checks in a row that make an engine unhealthy; one reply may get lost
TIMEOUT_INTERVALS = 3.0  # that a reply may take
# An engine on which this many reservations in a row expire may hang; then one at a time shows whether it does.
EXPIRED_RESERVATIONS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


class EngineHealth:
    """Checks an engine's /health, if it has a URL, and decides whether the engine runs."""

    def __init__(self, engine_url: str, *, interval_s: float, stall_s: float) -> None:
        """Start healthy; `stall_s` is how long a step may be overdue."""
        self._origin = origin_of(engine_url) if engine_url else None
        self._interval_s = interval_s
        self._stall_s = stall_s
        self._num_failures = 0
        self._reason = ""
        self._arrivals = CircuitState(
            failures_to_open=EXPIRED_RESERVATIONS, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S
        )

    @property
    def is_healthy(self) -> bool:
        """Return whether the last checks succeeded."""
        return self._num_failures < FAILURES

    def require_running(self, view: EngineView, now_s: float) -> None:
        """Raise a DownError if the engine is unhealthy, stalled, or shows none of its reserved requests."""
        if not self.is_healthy:
            raise DownError(self._reason, common_pb2.INSTANCE_STATE_DOWN)
        if view.overdue_s > self._stall_s:
            raise DownError(f"a step is {view.overdue_s:.1f} s overdue", common_pb2.INSTANCE_STATE_DOWN)
        if not self._arrivals.may_try(now_s):  # draining: the clients may be at fault, so it stays a last resort
            raise DownError("none of the last reserved requests has reached it", common_pb2.INSTANCE_STATE_DRAINING)

    def on_reserved(self, now_s: float) -> None:
        """Record a new reservation."""
        self._arrivals.allows(now_s)

    def on_shown(self) -> None:
        """Record that a request has reached the engine."""
        self._arrivals.succeeded()

    def on_expired(self, now_s: float) -> None:
        """Record a reservation whose request has not reached the engine in time."""
        self._arrivals.failed(now_s)

    async def watch(self) -> None:
        """Check /health at every interval."""
        if self._origin is None:
            return
        client = engine_client()
        try:
            while True:
                await self._check(client, self._origin)
                await asyncio.sleep(self._interval_s)
        finally:
            client.close()

    async def _check(self, client: HttpClient, origin: Origin) -> None:
        try:
            status, _ = await client.get(origin, b"/health", within_s=TIMEOUT_INTERVALS * self._interval_s)
            self._reason = "" if status == 200 else f"its /health returns {status}"
        except (OSError, TimeoutError, ValueError) as error:
            self._reason = f"its /health fails: {error or type(error).__name__}"
        was_healthy = self.is_healthy
        self._num_failures = self._num_failures + 1 if self._reason else 0
        if was_healthy and not self.is_healthy:
            log_event(log, logging.WARNING, "engine is unhealthy", reason=self._reason)
        elif self.is_healthy and not was_healthy:
            log_event(log, logging.INFO, "engine is healthy again")
