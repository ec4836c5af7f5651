"""What a sidecar counts."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)


class SidecarMetrics:
    """The sidecars' own metrics, in a registry; each is told by instance."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register them."""
        self.predict_s = Histogram(
            "block_predict_seconds",
            "Looking at the engine and forecasting.",
            ("instance",),
            buckets=SECONDS,
            registry=registry,
        )
        self.forecasts = Counter("block_forecasts", "Requests forecast.", ("instance", "result"), registry=registry)
        self.reserves = Counter("block_reserves", "Reservations asked for.", ("instance", "result"), registry=registry)
        self.ended = Counter(
            "block_reservations_ended", "How reservations ended.", ("instance", "how"), registry=registry
        )
        self.reservations = Gauge(
            "block_reservations", "Requests promised and not yet shown.", ("instance",), registry=registry
        )
        self.error = Histogram(
            "block_forecast_error_ratio",
            "|predicted - actual| / actual of forecasts that requests were placed by.",
            ("instance", "quantity"),
            buckets=RATIOS,
            registry=registry,
        )
        self.bias = Gauge(
            "block_forecast_bias_ratio",
            "(predicted - actual) / actual, smoothed.",
            ("instance", "quantity"),
            registry=registry,
        )
        self.pace = Gauge(
            "block_pace_ratio", "Real over predicted step time, smoothed.", ("instance",), registry=registry
        )
        self.source = Gauge(
            "block_state_source",
            "1 for where the picture of the engine comes from.",
            ("instance", "source"),
            registry=registry,
        )
        self.up = Gauge("block_engine_up", "1 while the engine is seen to run.", ("instance",), registry=registry)


class InstanceMetrics:
    """What is counted of one instance."""

    def __init__(self, measures: SidecarMetrics, instance_id: str) -> None:
        """Begin a row of each metric."""
        self._of, self._name = measures, instance_id
        self.predict_s = measures.predict_s.labels(instance_id)
        self.reservations = measures.reservations.labels(instance_id)
        self.pace = measures.pace.labels(instance_id)
        self.up = measures.up.labels(instance_id)

    def comes_from(self, source: str) -> None:
        """Note where the picture of the engine comes from."""
        self._of.source.labels(self._name, source).set(1)

    def forecast(self, result: str) -> None:
        """Count a request that was asked about."""
        self._of.forecasts.labels(self._name, result).inc()

    def reserved(self, result: str) -> None:
        """Count an attempt to reserve."""
        self._of.reserves.labels(self._name, result).inc()

    def ended(self, how: str, num: int = 1) -> None:
        """Count reservations that ended."""
        self._of.ended.labels(self._name, how).inc(num)

    def erred(self, quantity: str, ratio: float, bias: float) -> None:
        """Note the error of one forecast, and how it goes with their mean."""
        self._of.error.labels(self._name, quantity).observe(abs(ratio))
        self._of.bias.labels(self._name, quantity).set(bias)


class EngineGauges(Protocol):
    """Who knows how many requests came to the engine unseen."""

    num_unknown: int


class MirrorMetrics:
    """What is counted beside an engine that is mirrored."""

    def __init__(self, registry: CollectorRegistry, instance_id: str, mirror: EngineGauges) -> None:
        """Register it."""
        self._name = instance_id
        self._answers = Counter(
            "block_proxy_requests",
            "Answers passed on to the engine's clients.",
            ("instance", "path", "code"),
            registry=registry,
        )
        unknown = Gauge(
            "block_unknown_requests",
            "Requests on the engine that did not come through the proxy.",
            ("instance",),
            registry=registry,
        )
        unknown.labels(instance_id).set_function(lambda: mirror.num_unknown)

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answers.labels(self._name, path, str(status)).inc()
