"""The recent accuracy of estimators for Prometheus, read when metrics are collected."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from length_tagger.chain import Chain

LABELS = ("estimator", "model")


class Drift(Collector):
    """Bias, error and drift of each corrected estimator, by model."""

    def __init__(self, chain: Chain) -> None:
        """Watch a chain."""
        self._chain = chain

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the records."""
        bias = GaugeMetricFamily(
            "block_tagger_bias", "Recent logarithm of real over estimated length; estimates are corrected by it.",
            labels=LABELS,
        )  # fmt: skip
        error = GaugeMetricFamily(
            "block_tagger_error", "Recent mean absolute error of the corrected logarithm.", labels=LABELS
        )
        drift = GaugeMetricFamily(
            "block_tagger_drift",
            "1 where the bias exceeds a factor of 1.5: train it again.",
            labels=LABELS,
        )
        for estimator, model, record in self._chain.records():
            bias.add_metric((estimator, model), record.bias)
            error.add_metric((estimator, model), record.error)
            drift.add_metric((estimator, model), float(record.drifted))
        yield from (bias, error, drift)
