"""What a sidecar counts."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)


class Measures:
    """The sidecar's own metrics, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them."""
        self.predict_s = Histogram(
            "block_predict_seconds", "Looking at the engine and forecasting.", buckets=SECONDS, registry=registry
        )
        self.forecasts = Counter("block_forecasts", "Requests forecast.", ("result",), registry=registry)
        self.reserves = Counter("block_reserves", "Reservations asked for.", ("result",), registry=registry)
        self.ended = Counter("block_reservations_ended", "How reservations ended.", ("how",), registry=registry)
        self.reserved = Gauge("block_reservations", "Requests promised and not yet shown.", registry=registry)
        self.error = Histogram(
            "block_forecast_error_ratio",
            "|predicted - actual| / actual of forecasts that requests were placed by.",
            ("quantity",),
            buckets=RATIOS,
            registry=registry,
        )
        self.bias = Gauge(
            "block_forecast_bias_ratio", "(predicted - actual) / actual, smoothed.", ("quantity",), registry=registry
        )
        self.pace = Gauge("block_pace_ratio", "Real over predicted step time, smoothed.", registry=registry)
        self.source = Gauge(
            "block_state_source", "1 for where the picture of the engine comes from.", ("source",), registry=registry
        )
        self.up = Gauge("block_engine_up", "1 while the engine is seen to run.", registry=registry)


class Known(Protocol):
    """Who knows how many requests came to the engine unseen."""

    num_unknown: int


class MirrorMeasures:
    """What is counted beside an engine that is mirrored."""

    def __init__(self, registry: CollectorRegistry, mirror: Known) -> None:
        """Register it."""
        self._answers = Counter(
            "block_proxy_requests", "Answers passed on to the engine's clients.", ("path", "code"), registry=registry
        )
        unknown = Gauge(
            "block_unknown_requests", "Requests on the engine that did not come through the proxy.", registry=registry
        )
        unknown.set_function(lambda: mirror.num_unknown)

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(path, str(status)).inc()
