"""A circuit breaker that is counted in metrics and logged when it opens and closes."""

from __future__ import annotations

import logging
import time

from scheduler.circuit import CircuitState
from services.logs import log_event
from services.placement.metrics import SchedulerMetrics

log = logging.getLogger(__name__)


class CircuitBreaker:
    """Guards calls to one sidecar, or to one sidecar address."""

    def __init__(self, name: str, state: CircuitState, metrics: SchedulerMetrics) -> None:
        """Guard a part by a circuit that may be shared with the decision core."""
        self.state = state
        self._name = name
        self._metrics = metrics

    def is_open(self) -> bool:
        """Return whether calls are stopped."""
        return self.state.is_open()

    def allows_trial(self) -> bool:
        """Return whether an open circuit lets one call through now."""
        return self.state.allows(time.monotonic())

    def failed(self, kind: str) -> bool:
        """Count a failure; return whether it opened the circuit."""
        if not self.state.failed(time.monotonic()):
            return False
        self._metrics.circuits_open.inc()
        log_event(log, logging.WARNING, "circuit opened", sidecar=self._name, kind=kind)
        return True

    def succeeded(self) -> None:
        """Close the circuit."""
        if self.state.is_open():
            self._metrics.circuits_open.dec()
            log_event(log, logging.INFO, "circuit closed", sidecar=self._name)
        self.state.succeeded()

    def close(self) -> None:
        """Stop counting it."""
        if self.state.is_open():
            self._metrics.circuits_open.dec()
