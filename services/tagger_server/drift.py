"""How estimators fare lately, for Prometheus: read off their records whenever somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from length_tagger.chain import Chain

LABELS = ("estimator", "model")


class Drift(Collector):
    """Bias, error and drift of each estimator that is corrected, for each model."""

    def __init__(self, chain: Chain) -> None:
        """Watch a chain."""
        self._chain = chain

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the records."""
        bias = GaugeMetricFamily(
            "block_tagger_bias", "Logarithm of real over estimated length, lately; taken away from estimates.",
            labels=LABELS,
        )  # fmt: skip
        error = GaugeMetricFamily(
            "block_tagger_error", "Mean absolute error of the logarithm that is left, lately.", labels=LABELS
        )
        drift = GaugeMetricFamily(
            "block_tagger_drift", "1 where the bias is more than a factor of 1.5: time to train anew.", labels=LABELS
        )
        for estimator, model, record in self._chain.records():
            bias.add_metric((estimator, model), record.bias)
            error.add_metric((estimator, model), record.error)
            drift.add_metric((estimator, model), float(record.drifted))
        yield from (bias, error, drift)
