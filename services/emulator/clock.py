"""The emulated engine's time: its clock, and the noise of its steps."""

from __future__ import annotations

import math
import time

import numpy as np

MAX_NOISE = 1.0


class EngineClock:
    """Engine time, `speed` times as fast as the monotonic clock; it can be held, and set back."""

    def __init__(self, speed: float) -> None:
        """Start at engine time 0."""
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"speed: must be above 0, not {speed}")
        self.speed = speed
        self.origin_s = time.monotonic()  # at which engine time is 0
        self._held_at_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Tell whether time is held."""
        return self._held_at_s is not None

    def now_s(self) -> float:
        """Return the engine time now."""
        if self._held_at_s is not None:
            return self._held_at_s
        return (time.monotonic() - self.origin_s) * self.speed

    def hold(self) -> None:
        """Stop time."""
        self._held_at_s = self.now_s()

    def release(self) -> None:
        """Continue from the time at which it was held."""
        if self._held_at_s is not None:
            self.origin_s = time.monotonic() - self._held_at_s / self.speed
            self._held_at_s = None

    def set_back(self, to_s: float) -> None:
        """Continue from an earlier engine time."""
        self.origin_s = time.monotonic() - to_s / self.speed

    def wall_s(self, engine_s: float) -> float:
        """Convert an engine time to the monotonic clock."""
        return self.origin_s + engine_s / self.speed


class Pace:
    """Factors of step times: seeded noise, log-normal with mean 1, times the factor of a fault."""

    def __init__(self, noise: float, seed: int) -> None:
        """Set the relative standard deviation of the noise."""
        if not (math.isfinite(noise) and 0 <= noise <= MAX_NOISE):
            raise ValueError(f"noise: must lie between 0 and {MAX_NOISE:g}, not {noise}")
        self._spread = math.sqrt(math.log1p(noise**2))
        self._draws = np.random.default_rng(seed)
        self.slow = 1.0

    def next(self) -> float:
        """Draw the factor of the next step."""
        if self._spread == 0:
            return self.slow
        return self.slow * math.exp(self._draws.normal(-(self._spread**2) / 2, self._spread))
