"""What forecasts cannot know: requests yet to come slow down those that run; how much, the last ones tell.

A forecast lets an engine's present load drain. Under steady traffic it does not drain, so answers take longer than
foretold, long ones more so than short ones. The order of instances hardly changes by this, what users are told does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from predictor.forecast_result import Forecast

ENOUGH = 8  # outcomes from which on a length class speaks for itself
REMEMBERED = 0.95  # of what was known, from one outcome to the next
LARGEST = math.log(4.0)  # one outcome may not say more than this


@dataclass(slots=True)
class Average:
    """A mean that forgets."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        """Take in one more."""
        self.count += 1
        kept = min(REMEMBERED, 1 - 1 / self.count)  # of the first few, the plain mean
        self.value = kept * self.value + (1 - kept) * sample


@dataclass(slots=True)
class Stretch:
    """By how much one span of time turns out longer than foretold, by its foretold length in powers of two."""

    overall: Average = field(default_factory=Average)
    by_length: dict[int, Average] = field(default_factory=dict)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Learn from what became of one forecast, uncorrected; what is no pair of positive times is left out."""
        if not (0 < predicted_s < math.inf and 0 < actual_s < math.inf):
            return
        ratio = max(-LARGEST, min(LARGEST, math.log(actual_s) - math.log(predicted_s)))
        self.overall.add(ratio)
        self.by_length.setdefault(_length_class(predicted_s), Average()).add(ratio)

    def factor(self, predicted_s: float) -> float:
        """What to multiply a foretold span with."""
        if not 0 < predicted_s < math.inf:
            return 1.0
        average = self.by_length.get(_length_class(predicted_s))
        if average is None or average.count < ENOUGH:
            average = self.overall
        return math.exp(average.value) if average.count >= ENOUGH else 1.0


@dataclass(slots=True)
class Calibration:
    """Corrects what users are told by what became of the last requests; policies compare the forecasts as they are."""

    first: Stretch = field(default_factory=Stretch)
    rest: Stretch = field(default_factory=Stretch)

    def observe(self, forecast: Forecast, ttft_s: float | None, e2e_s: float | None, pace: float = 1.0) -> None:
        """Learn from what became of an uncorrected forecast.

        `pace` is how many times as long its instance foretells steps to take by now: what is made up for by that is
        not to be made up for once more.
        """
        if ttft_s is None:
            return
        self.first.observe(forecast.ttft_s * pace, ttft_s)
        if e2e_s is not None:
            self.rest.observe((forecast.e2e_s - forecast.ttft_s) * pace, e2e_s - ttft_s)

    def corrected(self, forecast: Forecast) -> Forecast:
        """What to expect really."""
        if forecast.e2e_s == math.inf:
            return forecast
        first, rest_s = self.first.factor(forecast.ttft_s), forecast.e2e_s - forecast.ttft_s
        rest = self.rest.factor(rest_s)
        ttft_s = forecast.ttft_s * first
        return replace(
            forecast,
            queue_s=min(forecast.queue_s * first, ttft_s),
            ttft_s=ttft_s,
            e2e_s=ttft_s + rest_s * rest,
            tpot_s=forecast.tpot_s * rest,
        )


def _length_class(seconds: float) -> int:
    return math.floor(math.log2(seconds))
