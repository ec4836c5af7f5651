"""The emulated engine's clock: engine seconds that pass `speed` times as fast as the wall clock's."""

from __future__ import annotations

import math
import time


class EngineClock:
    """Engine time from the machine's monotonic clock; it can be held, and set back."""

    def __init__(self, speed: float) -> None:
        """Start at engine time 0."""
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"speed: must be above 0, not {speed}")
        self.speed = speed
        self.origin_s = time.monotonic()  # when engine time was, or would have been, 0
        self._held_at_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Tell whether time stands still."""
        return self._held_at_s is not None

    def now_s(self) -> float:
        """Engine time now."""
        if self._held_at_s is not None:
            return self._held_at_s
        return (time.monotonic() - self.origin_s) * self.speed

    def hold(self) -> None:
        """Let time stand still."""
        self._held_at_s = self.now_s()

    def release(self) -> None:
        """Let time go on from where it was held."""
        if self._held_at_s is not None:
            self.origin_s = time.monotonic() - self._held_at_s / self.speed
            self._held_at_s = None

    def set_back(self, to_s: float) -> None:
        """Let it be that earlier engine time now."""
        self.origin_s = time.monotonic() - to_s / self.speed

    def wall_s(self, engine_s: float) -> float:
        """Tell when, on the machine's monotonic clock, an engine time comes."""
        return self.origin_s + engine_s / self.speed
