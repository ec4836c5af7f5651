"""A circuit breaker: when to stop calling a component that fails, and when to try it again."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.backoff import Backoff


@dataclass(slots=True, kw_only=True)
class CircuitState:
    """Opens after consecutive failures, lets one trial call pass after a pause that doubles, closes on a success."""

    failures_to_open: int = 2
    first_pause_s: float = 0.25
    longest_pause_s: float = 8.0
    num_failures: int = 0
    retry_at_s: float = 0.0
    _on_trial: bool = False

    def is_open(self) -> bool:
        """Return whether the component counts as down."""
        return self.num_failures >= self.failures_to_open

    def may_try(self, now_s: float) -> bool:
        """Return whether a call may be made."""
        return not self.is_open() or now_s >= self.retry_at_s

    def allows(self, now_s: float) -> bool:
        """Return whether a call may be made; if the circuit is open, this call is the trial."""
        if not self.may_try(now_s):
            return False
        if self.is_open():
            self._on_trial = True
            self.retry_at_s = now_s + self.pause_s()
        return True

    def succeeded(self) -> None:
        """Close the circuit."""
        self.num_failures = 0
        self._on_trial = False

    def failed(self, now_s: float) -> bool:
        """Count a failure; return whether it opened the circuit.

        While it is open only the trial counts: calls in flight often fail together with the one that opened it.
        """
        was_open = self.is_open()
        if was_open and not self._on_trial:
            return False
        self._on_trial = False
        self.num_failures += 1
        self.retry_at_s = now_s + self.pause_s()
        return self.is_open() and not was_open

    def pause_s(self) -> float:
        """Return the time from a failure to the next trial."""
        backoff = Backoff(first_s=min(self.first_pause_s, self.longest_pause_s), max_s=self.longest_pause_s)
        return backoff.pause_s(self.num_failures - self.failures_to_open)
