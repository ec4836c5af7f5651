"""Online correction of a step time: a smoothed ratio of real to predicted seconds (ProServe §4.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from predictor.config import require_count
from predictor.step_time import NUM_REGIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionRule:
    """How a correction is smoothed.

    `momentum` is ProServe's θ, the weight of the old factor; the mean is over the last `window` steps; the factor and
    each sample are limited to the range from `lowest` to `highest`, so that a single outlier has little effect.
    """

    momentum: float = 0.9
    window: int = 32
    lowest: float = 0.25
    highest: float = 4.0

    def __post_init__(self) -> None:
        """Refuse values with which the factor would not converge."""
        if not (math.isfinite(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum: must be at least 0 and below 1, not {self.momentum}")
        require_count("window", self.window)
        if not (math.isfinite(self.lowest) and 0 < self.lowest <= 1):
            raise ValueError(f"lowest: must be above 0 and at most 1, not {self.lowest}")
        if not (math.isfinite(self.highest) and self.highest >= 1):
            raise ValueError(f"highest: must be finite and at least 1, not {self.highest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The factor for predicted seconds, after the steps observed so far."""

    rule: CorrectionRule = field(default_factory=CorrectionRule)
    factor: float = 1.0
    ratios: tuple[float, ...] = ()
    num_refused: int = 0

    def observe(self, *, predicted_s: float, real_s: float) -> Correction:
        """Return the correction after one more step, from its uncorrected prediction and its real duration.

        β becomes θ·β + (1-θ)·mean(real / predicted). Pairs that are not positive times are counted and ignored.
        """
        if not (_is_time(predicted_s) and _is_time(real_s)):
            return replace(self, num_refused=self.num_refused + 1)
        ratio = self._limited(real_s / predicted_s)
        ratios = (*self.ratios, ratio)[-self.rule.window :]
        mean = math.fsum(ratios) / len(ratios)
        kept = self.rule.momentum
        return replace(self, factor=self._limited(kept * self.factor + (1 - kept) * mean), ratios=ratios)

    def _limited(self, value: float) -> float:
        return min(self.rule.highest, max(self.rule.lowest, value))


MIN_STEPS = 8  # of a region, from which on it has a factor of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCorrection:
    """A correction for each region of batches, so that what is wrong about chunks does not change decodes.

    A region of which few steps were observed has the factor of all steps.
    """

    every: Correction = field(default_factory=Correction)
    by_region: tuple[Correction, ...] = (Correction(),) * NUM_REGIONS

    def observe(self, region: int, *, predicted_s: float, real_s: float) -> RegionCorrection:
        """Return the correction after one more step of a region."""
        of_region = self.by_region[region].observe(predicted_s=predicted_s, real_s=real_s)
        return RegionCorrection(
            every=self.every.observe(predicted_s=predicted_s, real_s=real_s),
            by_region=(*self.by_region[:region], of_region, *self.by_region[region + 1 :]),
        )

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor of each region."""
        return tuple(one.factor if len(one.ratios) >= MIN_STEPS else self.every.factor for one in self.by_region)


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0
