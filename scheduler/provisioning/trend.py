"""Estimates the trend of a rate from counts: constant, a step, or a line; noise is not taken for a trend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Penalties for the further parameters of a line and of a step, in units of the variance of the counts. A step can be
# anywhere, so that the best one fits noise better than a line does.
LINE_PENALTY, STEP_PENALTY = 16.0, 24.0
CAUTION = 0.5  # standard errors of the rate that a cautious estimate adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A rate now, its slope, and the time over which it was observed."""

    level_per_s: float = 0.0
    slope_per_s2: float = 0.0
    observed_s: float = 0.0

    def at(self, ahead_s: float) -> float:
        """Return the rate at a time ahead."""
        return max(0.0, self.level_per_s + self.slope_per_s2 * ahead_s)

    def cautious(self, ahead_s: float) -> float:
        """Return the rate at a time ahead, plus a part of its standard error."""
        level = self.at(ahead_s)
        return level + CAUTION * math.sqrt(level / self.observed_s) if self.observed_s > 0 else level


def trend_of(counts: npt.NDArray[np.float64], bin_s: float) -> Trend:
    """Fit a constant, a step or a line to the counts of equal bins, oldest first, and return the best fit."""
    num = len(counts)
    mean = float(counts.mean()) if num else 0.0
    if num < 3 or mean == 0:
        return Trend(level_per_s=mean / bin_s, observed_s=num * bin_s)
    noise = max(mean, 1.0)
    constant = float(((counts - mean) ** 2).sum()) / noise
    line, end, slope = _line(counts)
    step, start = _step(counts)
    costs = (constant, step / noise + STEP_PENALTY, line / noise + LINE_PENALTY)
    best = costs.index(min(costs))
    if best == 0:
        return Trend(level_per_s=mean / bin_s, observed_s=num * bin_s)
    if best == 1:
        return Trend(level_per_s=float(counts[start:].mean()) / bin_s, observed_s=(num - start) * bin_s)
    return Trend(level_per_s=max(0.0, end) / bin_s, slope_per_s2=slope / bin_s**2, observed_s=num * bin_s / 4)


def _line(counts: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Fit a line; return its squared error, its value at the end of the last bin, and its slope per bin."""
    offsets = np.arange(len(counts)) - (len(counts) - 1) / 2
    slope = float(offsets @ counts) / float(offsets @ offsets)
    mean = float(counts.mean())
    error = float(((counts - mean - slope * offsets) ** 2).sum())
    return error, mean + slope * (float(offsets[-1]) + 0.5), slope


def _step(counts: npt.NDArray[np.float64]) -> tuple[float, int]:
    """Fit one step; return its squared error, and the index of the first bin after it."""
    num = len(counts)
    sums = np.cumsum(counts)
    before = np.arange(1, num)
    after = num - before
    gain = sums[:-1] ** 2 / before + (sums[-1] - sums[:-1]) ** 2 / after
    best = int(np.argmax(gain))
    return float((counts**2).sum() - gain[best]), best + 1
