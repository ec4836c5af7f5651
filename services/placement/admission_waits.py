"""Waits of decisions in the admission queue, on the wall clock."""

from __future__ import annotations

import asyncio
import math
import time

from scheduler.core import SchedulerCore
from scheduler.decision import Decision
from services.placement.metrics import SchedulerMetrics


class AdmissionWaits:
    """Suspends decisions until a time, or until the decision core says that it is their turn."""

    def __init__(self, core: SchedulerCore, metrics: SchedulerMetrics) -> None:
        """Start with an empty queue."""
        self._core = core
        self._metrics = metrics
        self._wakeups: dict[Decision, asyncio.Event] = {}

    async def wait(self, decision: Decision, until_s: float) -> None:
        """Wait in the admission queue until a time, or until it is the decision's turn."""
        wakeup = self._wakeups.get(decision)
        if wakeup is None:
            wakeup = self._wakeups[decision] = asyncio.Event()
            self._metrics.held.inc()
        wakeup.clear()
        if decision.wait_until_s == -math.inf:
            return
        try:
            async with asyncio.timeout(None if until_s == math.inf else max(0.0, until_s - time.monotonic())):
                await wakeup.wait()
        except TimeoutError:
            pass

    def wake(self) -> None:
        """Wake the decisions whose turn it is."""
        while self._core.ready:
            wakeup = self._wakeups.get(self._core.ready.popleft())
            if wakeup is not None:
                wakeup.set()

    def end(self, decision: Decision, how: str) -> None:
        """End the wait of a decision, if it waited, and count how: admitted, not_admitted, or left."""
        if self._wakeups.pop(decision, None) is not None and decision.admission is not None:
            self._metrics.held.dec()
            self._metrics.holds.labels(how).inc()
            self._metrics.held_s.observe(time.monotonic() - decision.admission.joined_s)
