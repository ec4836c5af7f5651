"""The number of reservations an instance has made: those reported, and this scheduler's own in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReservationVersions:
    """Follows an instance's count of reservations, which restarts from zero with each epoch.

    A reservation in flight counts as made, so that a burst of decisions does not rest on the same forecast. If it
    fails, the instance answers those that counted on it with a conflict.
    """

    epoch: int = 0
    head: int = 0  # the count once all reservations in flight have been made
    _reported: int = 0
    _claims: list[int] = field(default_factory=list)

    def report(self, version: int, epoch: int) -> None:
        """Take a count that the instance reported; within one epoch the highest holds, as replies may be reordered."""
        self._reported = max(self._reported, version) if epoch == self.epoch else version
        self.epoch = epoch
        self._count()

    def since(self, version: int, epoch: int) -> int:
        """Count the reservations made after a forecast."""
        return max(0, self.head - version) if epoch == self.epoch else 0

    @contextmanager
    def claimed(self, version: int | None) -> Iterator[None]:
        """Count a reservation while it is in flight; `version` is the count it depends on, None for any."""
        claim = (self.head if version is None else version) + 1
        self._claims.append(claim)
        self._count()
        try:
            yield
        finally:
            self._claims.remove(claim)
            self._count()

    def _count(self) -> None:
        self.head = max(self._reported, *self._claims) if self._claims else self._reported
