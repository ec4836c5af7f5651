"""Whether a part is asked: one that failed too often in a row is left alone, and tried again after a while."""

from __future__ import annotations

import logging
import time

from scheduler.circuit import CircuitState
from services.logs import log_event
from services.scheduler_server.metrics import SchedulerMetrics

log = logging.getLogger(__name__)


class CircuitBreaker:
    """A circuit that is counted, and told of."""

    def __init__(self, name: str, circuit: CircuitState, measures: SchedulerMetrics) -> None:
        """Trust a part until it fails."""
        self._name = name
        self._circuit = circuit
        self._measures = measures

    def is_lost(self) -> bool:
        """Tell whether the part is left alone."""
        return self._circuit.is_open()

    def allows_trial(self) -> bool:
        """Tell whether to try it again now, where it is left alone."""
        return self._circuit.allows(time.monotonic())

    def failed(self, kind: str) -> bool:
        """Count a failure; tell whether it is the one too many."""
        if not self._circuit.failed(time.monotonic()):
            return False
        self._measures.circuits_open.inc()
        log_event(log, logging.WARNING, "sidecar left alone", sidecar=self._name, kind=kind)
        return True

    def succeeded(self) -> None:
        """Trust it again."""
        if self._circuit.is_open():
            self._measures.circuits_open.dec()
            log_event(log, logging.INFO, "sidecar answers again", sidecar=self._name)
        self._circuit.succeeded()

    def forget(self) -> None:
        """Count it no more."""
        if self._circuit.is_open():
            self._measures.circuits_open.dec()
