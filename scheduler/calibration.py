"""Corrects the forecasts that clients get by how recent forecasts compared with their outcomes.

A forecast assumes that no more requests arrive, so that the load of an engine drains. Under steady traffic it does not
drain, and responses take longer than predicted: long ones more so, and more so those that begin while the engine has
little load. This hardly changes the ranking of instances, so that policies read uncorrected forecasts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from predictor.forecast_result import Forecast

MIN_OUTCOMES = 8  # before anything is corrected
RECENT = 100  # outcomes whose median counts
DECAY = 0.99  # weight of earlier outcomes at each further one
PRIOR_OUTCOMES = 2.0  # weight of the assumption that times are as predicted
MAX_LOG_RATIO = math.log(4.0)  # a single outcome counts as at most this, and no correction is larger
MAX_DEVIATIONS = 2.0  # standard deviations from the mean, beyond which a feature counts as if it were there
LEAST_SHARE = 0.25  # of a predicted time that a corrected one has at least


@dataclass(slots=True)
class TimeDifference:
    """By how much times exceed predicted ones: the median of recent outcomes, the same for short and long times.

    The way to an engine and back, which a forecast does not know, adds as much to a request that waits as to one that
    does not. A ratio learned from requests that do not wait would be too much for those that do.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    median: float = 0.0

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Learn from the outcome of one uncorrected forecast; times that are not positive and finite are ignored."""
        if _are_times(predicted_s, actual_s):
            self.recent.append(actual_s - predicted_s)
            if len(self.recent) >= MIN_OUTCOMES:
                self.median = statistics.median(self.recent)

    def corrected(self, predicted_s: float) -> float:
        """Return a predicted time with the difference."""
        return max(LEAST_SHARE * predicted_s, predicted_s + self.median)


@dataclass(slots=True)
class _Moments:
    """Weighted means of two features, a and b, and of a result, and their covariances."""

    weight: float = 0.0
    mean_a: float = 0.0
    mean_b: float = 0.0
    mean: float = 0.0  # of the result
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    a_result: float = 0.0
    b_result: float = 0.0

    def add(self, a: float, b: float, result: float) -> None:
        """Add an outcome; earlier ones lose weight."""
        before = DECAY * self.weight
        self.weight = before + 1
        share, kept = 1 / self.weight, before / self.weight
        off_a, off_b, off = a - self.mean_a, b - self.mean_b, result - self.mean
        self.mean_a += share * off_a
        self.mean_b += share * off_b
        self.mean += share * off
        self.aa = kept * (self.aa + share * off_a * off_a)
        self.ab = kept * (self.ab + share * off_a * off_b)
        self.bb = kept * (self.bb + share * off_b * off_b)
        self.a_result = kept * (self.a_result + share * off_a * off)
        self.b_result = kept * (self.b_result + share * off_b * off)


@dataclass(slots=True)
class DurationRatio:
    """The ratio of actual to predicted decode times, by how long they are and by their time per token.

    Its logarithm is a linear function of the logarithms of both, fitted to recent outcomes with a prior of no
    correction.
    """

    moments: _Moments = field(default_factory=_Moments)
    num_outcomes: int = 0
    slope_a: float = 0.0  # by the logarithm of the decode time
    slope_b: float = 0.0  # by that of its time per token

    def observe(self, predicted_s: float, actual_s: float, tokens: int) -> None:
        """Learn from the outcome of one uncorrected forecast; times that are not positive and finite are ignored."""
        if not _are_times(predicted_s, actual_s):
            return
        ratio = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, math.log(actual_s) - math.log(predicted_s)))
        self.num_outcomes += 1
        found = self.moments
        found.add(*_features(predicted_s, tokens), ratio)
        prior = PRIOR_OUTCOMES / found.weight
        aa, bb = found.aa + prior, found.bb + prior
        determinant = aa * bb - found.ab * found.ab
        self.slope_a = (bb * found.a_result - found.ab * found.b_result) / determinant
        self.slope_b = (aa * found.b_result - found.ab * found.a_result) / determinant

    def factor(self, predicted_s: float, tokens: int) -> float:
        """Return the factor by which to multiply a predicted time."""
        if self.num_outcomes < MIN_OUTCOMES or not 0 < predicted_s < math.inf:
            return 1.0
        found = self.moments
        a, b = _features(predicted_s, tokens)
        ratio = found.mean * found.weight / (found.weight + PRIOR_OUTCOMES)
        ratio += self.slope_a * _limited(a - found.mean_a, found.aa)
        ratio += self.slope_b * _limited(b - found.mean_b, found.bb)
        return math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, ratio)))


@dataclass(slots=True)
class Calibration:
    """Corrects forecasts for clients: the time to the first token, and the time from there to the last one."""

    ttft: TimeDifference = field(default_factory=TimeDifference)
    decode: DurationRatio = field(default_factory=DurationRatio)

    def observe(self, forecast: Forecast, ttft_s: float | None, e2e_s: float | None, pace: float = 1.0) -> None:
        """Learn from the outcome of an uncorrected forecast.

        `pace` is the factor by which the instance has corrected its predicted step time since the forecast, so that
        the same error is not corrected twice.
        """
        if ttft_s is None:
            return
        self.ttft.observe(forecast.ttft_s * pace, ttft_s)
        if e2e_s is not None:
            decode_s = (forecast.e2e_s - forecast.ttft_s) * pace
            self.decode.observe(decode_s, e2e_s - ttft_s, forecast.output_tokens)

    def corrected(self, forecast: Forecast) -> Forecast:
        """Return a forecast with corrected times."""
        if forecast.e2e_s == math.inf:
            return forecast
        ttft_s, decode_s = self.ttft.corrected(forecast.ttft_s), forecast.e2e_s - forecast.ttft_s
        factor = self.decode.factor(decode_s, forecast.output_tokens)
        return replace(
            forecast,
            queue_s=min(forecast.queue_s, ttft_s),
            ttft_s=ttft_s,
            e2e_s=ttft_s + decode_s * factor,
            tpot_s=forecast.tpot_s * factor,
        )


def _are_times(*seconds: float) -> bool:
    return all(0 < one < math.inf for one in seconds)


def _features(decode_s: float, tokens: int) -> tuple[float, float]:
    """Return the logarithms of a decode time, and of its time per token."""
    duration = math.log(decode_s)
    return duration, duration - math.log(max(1, tokens - 1))


def _limited(deviation: float, variance: float) -> float:
    most = MAX_DEVIATIONS * math.sqrt(max(0.0, variance))
    return max(-most, min(most, deviation))
