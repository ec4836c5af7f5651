"""How long to wait before the next retry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_DOUBLINGS = 30


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Pauses that double from `first_s` to `max_s`.

    `random` draws numbers from 0 to 1; each pause is shortened by up to `jitter` of itself, so that clients which
    failed together do not retry together. Without `random` pauses are exact.
    """

    first_s: float
    max_s: float
    jitter: float = 0.5
    random: Callable[[], float] | None = None
    num_pauses: int = 0  # since the last success

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 <= self.first_s <= self.max_s:
            raise ValueError(f"first_s: must lie between 0 and max_s ({self.max_s}), not {self.first_s}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter: must lie between 0 and 1, not {self.jitter}")

    def pause_s(self, num_pauses: int) -> float:
        """Return the pause that follows so many earlier ones."""
        pause_s = min(self.max_s, self.first_s * 2.0 ** min(max(0, num_pauses), MAX_DOUBLINGS))
        return pause_s if self.random is None else pause_s * (1.0 - self.jitter * self.random())

    def next_s(self) -> float:
        """Return the next pause, and count it."""
        pause_s = self.pause_s(self.num_pauses)
        self.num_pauses += 1
        return pause_s

    def reset(self) -> None:
        """Start again from the first pause, after a success."""
        self.num_pauses = 0
