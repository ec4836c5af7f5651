"""How many promises an instance has made: those heard of, and our own that are under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReservationVersions:
    """Follows an instance's count of promises, which begins anew with each epoch.

    Who decides while a promise is under way takes it for made, so that a burst of decisions does not rest on one and
    the same forecast. If it comes to nothing, the instance tells those who counted on it that they are wrong.
    """

    _epoch: int = 0
    _heard: int = 0
    _claims: list[int] = field(default_factory=list)

    @property
    def head(self) -> int:
        """The count, once all that is under way has been promised."""
        return max(self._heard, *self._claims) if self._claims else self._heard

    def hear(self, version: int, epoch: int) -> None:
        """Take a count that the instance told; of one epoch, the highest holds, as answers overtake each other."""
        self._heard = max(self._heard, version) if epoch == self._epoch else version
        self._epoch = epoch

    def since(self, version: int, epoch: int) -> int:
        """Count the promises made after a forecast."""
        return max(0, self.head - version) if epoch == self._epoch else 0

    @contextmanager
    def claimed(self, version: int | None) -> Iterator[None]:
        """Count a promise that is under way, made after so many others; None: after however many there are."""
        claim = (self.head if version is None else version) + 1
        self._claims.append(claim)
        try:
            yield
        finally:
            self._claims.remove(claim)
