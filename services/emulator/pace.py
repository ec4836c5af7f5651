"""How much longer or shorter than its profile says a step takes."""

from __future__ import annotations

import math

import numpy as np

MOST_NOISE = 1.0


class Pace:
    """Seeded noise on step times, log-normal with mean 1, times what a fault makes of them."""

    def __init__(self, noise: float, seed: int) -> None:
        """Take the noise's relative standard deviation."""
        if not (math.isfinite(noise) and 0 <= noise <= MOST_NOISE):
            raise ValueError(f"noise: must lie between 0 and {MOST_NOISE:g}, not {noise}")
        self._spread = math.sqrt(math.log1p(noise**2))
        self._draws = np.random.default_rng(seed)
        self.slow = 1.0

    def next(self) -> float:
        """Draw the pace of one more step."""
        if self._spread == 0:
            return self.slow
        return self.slow * math.exp(self._draws.normal(-(self._spread**2) / 2, self._spread))
