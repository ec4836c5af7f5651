"""Corrects the forecasts that clients get by how recent forecasts compared with their outcomes.

A forecast assumes that no more requests arrive, so that the load of an engine drains. Under steady traffic it does not
drain, and responses take longer than predicted, long ones more so than short ones. This hardly changes the ranking of
instances, so that policies read uncorrected forecasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from predictor.forecast_result import Forecast

MIN_OUTCOMES = 8  # of a length class, from which on it has a correction of its own
DECAY = 0.95  # weight of the earlier mean at each further sample
MAX_LOG_RATIO = math.log(4.0)  # a single outcome counts as at most this


@dataclass(slots=True)
class DecayingMean:
    """A mean in which later samples weigh more."""

    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        """Add a sample."""
        self.count += 1
        kept = min(DECAY, 1 - 1 / self.count)  # the first samples weigh the same
        self.value = kept * self.value + (1 - kept) * sample


@dataclass(slots=True)
class TimeCorrection:
    """The ratio of actual to predicted time, overall and by predicted time in powers of two."""

    overall: DecayingMean = field(default_factory=DecayingMean)
    by_length: dict[int, DecayingMean] = field(default_factory=dict)

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Learn from the outcome of one uncorrected forecast; times that are not positive and finite are ignored."""
        if not (0 < predicted_s < math.inf and 0 < actual_s < math.inf):
            return
        ratio = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, math.log(actual_s) - math.log(predicted_s)))
        self.overall.add(ratio)
        self.by_length.setdefault(_length_class(predicted_s), DecayingMean()).add(ratio)

    def factor(self, predicted_s: float) -> float:
        """Return the factor by which to multiply a predicted time."""
        if not 0 < predicted_s < math.inf:
            return 1.0
        mean = self.by_length.get(_length_class(predicted_s))
        if mean is None or mean.count < MIN_OUTCOMES:
            mean = self.overall
        return math.exp(mean.value) if mean.count >= MIN_OUTCOMES else 1.0


@dataclass(slots=True)
class Calibration:
    """Corrects forecasts for clients: the time to the first token, and the time from there to the last one."""

    ttft: TimeCorrection = field(default_factory=TimeCorrection)
    decode: TimeCorrection = field(default_factory=TimeCorrection)

    def observe(self, forecast: Forecast, ttft_s: float | None, e2e_s: float | None, pace: float = 1.0) -> None:
        """Learn from the outcome of an uncorrected forecast.

        `pace` is the factor by which the instance has corrected its predicted step time since the forecast, so that
        the same error is not corrected twice.
        """
        if ttft_s is None:
            return
        self.ttft.observe(forecast.ttft_s * pace, ttft_s)
        if e2e_s is not None:
            self.decode.observe((forecast.e2e_s - forecast.ttft_s) * pace, e2e_s - ttft_s)

    def corrected(self, forecast: Forecast) -> Forecast:
        """Return a forecast with corrected times."""
        if forecast.e2e_s == math.inf:
            return forecast
        ttft_factor, decode_s = self.ttft.factor(forecast.ttft_s), forecast.e2e_s - forecast.ttft_s
        decode_factor = self.decode.factor(decode_s)
        ttft_s = forecast.ttft_s * ttft_factor
        return replace(
            forecast,
            queue_s=min(forecast.queue_s * ttft_factor, ttft_s),
            ttft_s=ttft_s,
            e2e_s=ttft_s + decode_s * decode_factor,
            tpot_s=forecast.tpot_s * decode_factor,
        )


def _length_class(seconds: float) -> int:
    return math.floor(math.log2(seconds))
