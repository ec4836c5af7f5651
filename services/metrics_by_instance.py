"""Registers metrics that have the label `instance`, and labels of their own after it."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

INSTANCE = "instance"


class MetricsByInstance:
    """Registers metrics in one registry; `scripts/generate_metrics_reference.py` reads the calls of its methods."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register into a registry."""
        self._registry = registry

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        """Register a counter."""
        return Counter(name, meaning, (INSTANCE, *labels), registry=self._registry)

    def gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        """Register a gauge."""
        return Gauge(name, meaning, (INSTANCE, *labels), registry=self._registry)

    def histogram(self, name: str, meaning: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        """Register a histogram."""
        return Histogram(name, meaning, (INSTANCE, *labels), buckets=buckets, registry=self._registry)
