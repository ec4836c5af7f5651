"""Where a rate is going, told from counts: it stays, it has jumped, or it climbs; noise is no trend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# What a line, or a step, must explain to be believed, in units of the counts' own noise; steps may be anywhere, and so
# there is always one that explains something.
PRICE_OF_LINE, PRICE_OF_STEP = 16.0, 24.0
SURE = 0.5  # deviations of the level's error that are added on the safe side


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A rate now, how fast it changes, and over how long it was seen like that."""

    level_per_s: float = 0.0
    slope_per_s2: float = 0.0
    seen_s: float = 0.0

    def at(self, ahead_s: float) -> float:
        """Say the rate so far ahead."""
        return max(0.0, self.level_per_s + self.slope_per_s2 * ahead_s)

    def safe(self, ahead_s: float) -> float:
        """Say the rate so far ahead, on the safe side of the noise."""
        level = self.at(ahead_s)
        return level + SURE * math.sqrt(level / self.seen_s) if self.seen_s > 0 else level


def trend_of(counts: npt.NDArray[np.float64], bin_s: float) -> Trend:
    """Read counts of equal spans, oldest first, as a constant, a step or a line, whichever explains them best."""
    num = len(counts)
    mean = float(counts.mean()) if num else 0.0
    if num < 3 or mean == 0:
        return Trend(level_per_s=mean / bin_s, seen_s=num * bin_s)
    noise = max(mean, 1.0)
    constant = float(((counts - mean) ** 2).sum()) / noise
    line, end, slope = _line(counts)
    step, start = _step(counts)
    costs = (constant, step / noise + PRICE_OF_STEP, line / noise + PRICE_OF_LINE)
    best = costs.index(min(costs))
    if best == 0:
        return Trend(level_per_s=mean / bin_s, seen_s=num * bin_s)
    if best == 1:
        seen = num - start
        return Trend(level_per_s=float(counts[start:].mean()) / bin_s, seen_s=seen * bin_s)
    return Trend(level_per_s=max(0.0, end) / bin_s, slope_per_s2=slope / bin_s**2, seen_s=num * bin_s / 4)


def _line(counts: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Fit a line: its squared error, its value at the end of the last span, its slope per span."""
    place = np.arange(len(counts)) - (len(counts) - 1) / 2
    slope = float(place @ counts) / float(place @ place)
    mean = float(counts.mean())
    error = float(((counts - mean - slope * place) ** 2).sum())
    return error, mean + slope * (float(place[-1]) + 0.5), slope


def _step(counts: npt.NDArray[np.float64]) -> tuple[float, int]:
    """Fit one step: its squared error, and the first place after it."""
    num = len(counts)
    sums = np.cumsum(counts)
    before = np.arange(1, num)
    after = num - before
    gain = sums[:-1] ** 2 / before + (sums[-1] - sums[:-1]) ** 2 / after
    best = int(np.argmax(gain))
    return float((counts**2).sum() - gain[best]), best + 1
