"""The metrics of sidecars: of each instance, of its forecasts, and of a mirror's proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from predictor.engine_view import EndedRequest
from scheduler.reservations import Reservation
from services.metrics_by_instance import MetricsByInstance

SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)

MAX_PENDING = 1 << 14  # forecasts that wait for the end of their request
BIAS_KEPT = 0.95  # from one request to the next


class SidecarMetrics:
    """The metrics of all instances of a process, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        register = MetricsByInstance(registry)
        self.predict_s = register.histogram(
            "block_predict_seconds", "Time to refresh the view of an engine and to make forecasts.", buckets=SECONDS
        )
        self.forecasts = register.counter("block_forecasts", "Requests forecast.", "result")
        self.reserves = register.counter("block_reserves", "Attempts to make a reservation.", "result")
        self.ended = register.counter("block_reservations_ended", "Reservations that ended, and how.", "how")
        self.reservations = register.gauge("block_reservations", "Reserved requests that have not reached the engine.")
        self.error = register.histogram(
            "block_forecast_error_ratio",
            "|predicted - actual| / actual of forecasts that requests were placed by.",
            "quantity",
            buckets=RATIOS,
        )
        self.bias = register.gauge("block_forecast_bias_ratio", "(predicted - actual) / actual, smoothed.", "quantity")
        self.unmeasured = register.counter(
            "block_unmeasured_forecasts_total", "Forecasts with steps outside of what the profile measured."
        )
        self.pace = register.gauge("block_pace_ratio", "Real over predicted step time, smoothed.")
        self.profile_bias = register.gauge(
            "block_profile_bias_ratio",
            "(replayed - measured) / measured of the last check of the profile: ttft, tpot, e2e, and step times.",
            "quantity",
        )
        self.profile_holds = register.gauge(
            "block_profile_holds",
            "1 where the last check found the profile within its tolerance, else 0; absent before the first one.",
        )
        self.profile_checks = register.counter(
            "block_profile_checks", "Checks of the profile, and their results.", "result"
        )
        self.source = register.gauge(
            "block_state_source", "1 for the source of the engine's state: exported or mirrored.", "source"
        )
        self.up = register.gauge("block_engine_up", "1 while the engine runs.")


class InstanceMetrics:
    """The metrics of one instance."""

    def __init__(self, metrics: SidecarMetrics, instance_id: str) -> None:
        """Label the metrics with the instance."""
        self._metrics, self._instance = metrics, instance_id
        self.predict_s = metrics.predict_s.labels(instance_id)
        self.reservations = metrics.reservations.labels(instance_id)
        self.pace = metrics.pace.labels(instance_id)
        self.unmeasured = metrics.unmeasured.labels(instance_id)
        self.up = metrics.up.labels(instance_id)

    def set_source(self, source: str) -> None:
        """Set the source of the engine's state."""
        self._metrics.source.labels(self._instance, source).set(1)

    def count_forecast(self, result: str) -> None:
        """Count a request that was to be forecast."""
        self._metrics.forecasts.labels(self._instance, result).inc()

    def count_reserve(self, result: str) -> None:
        """Count an attempt to make a reservation."""
        self._metrics.reserves.labels(self._instance, result).inc()

    def count_ended(self, how: str, num: int = 1) -> None:
        """Count reservations that ended."""
        self._metrics.ended.labels(self._instance, how).inc(num)

    def count_profile_check(self, result: str) -> None:
        """Count a check of the profile."""
        self._metrics.profile_checks.labels(self._instance, result).inc()

    def set_profile(self, *, holds: bool, biases: Mapping[str, float]) -> None:
        """Set whether the profile holds, and its biases by quantity."""
        self._metrics.profile_holds.labels(self._instance).set(holds)
        for quantity, bias in biases.items():
            self._metrics.profile_bias.labels(self._instance, quantity).set(bias)

    def observe_error(self, quantity: str, ratio: float, bias: float) -> None:
        """Record the relative error of one forecast, and the smoothed mean of all."""
        self._metrics.error.labels(self._instance, quantity).observe(abs(ratio))
        self._metrics.bias.labels(self._instance, quantity).set(bias)


class ForecastErrors:
    """Keeps the forecasts that requests were placed by, and compares each with how its request ended."""

    def __init__(self, metrics: InstanceMetrics) -> None:
        """Start without forecasts."""
        self._metrics = metrics
        self._pending: dict[str, Reservation] = {}
        self._bias: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of forecasts that wait for the end of their request."""
        return len(self._pending)

    def add(self, reservations: Iterable[Reservation]) -> None:
        """Keep the forecasts of requests that reached the engine; the oldest are dropped if there are too many."""
        for reservation in reservations:
            if reservation.forecast is None:
                continue
            if len(self._pending) >= MAX_PENDING:
                del self._pending[next(iter(self._pending))]
            self._pending[reservation.request.request_id] = reservation

    def compare(self, ended: Iterable[EndedRequest]) -> None:
        """Record the errors for requests that completed; others have no comparable times."""
        for one in ended:
            reservation = self._pending.pop(one.request_id, None)
            if reservation is None or reservation.forecast is None or not one.completed:
                continue
            forecast = reservation.forecast
            self._observe("ttft", forecast.ttft_s, one.ttft_s)
            self._observe("e2e", forecast.e2e_s, one.e2e_s)
            self._observe("output_tokens", forecast.output_tokens, one.output_tokens)
            is_single = one.num_requests == 1  # the tokens of several come side by side
            if is_single and one.ttft_s is not None and one.e2e_s is not None and one.output_tokens > 1:
                self._observe("tpot", forecast.tpot_s, (one.e2e_s - one.ttft_s) / (one.output_tokens - 1))

    def _observe(self, quantity: str, predicted: float, actual: float | None) -> None:
        if actual is None or actual <= 0:
            return
        ratio = (predicted - actual) / actual
        bias = BIAS_KEPT * self._bias.get(quantity, ratio) + (1 - BIAS_KEPT) * ratio
        self._bias[quantity] = bias
        self._metrics.observe_error(quantity, ratio, bias)


class MirrorMetrics:
    """The metrics of a mirrored engine's proxy."""

    def __init__(self, registry: CollectorRegistry, instance_id: str, num_unknown: Callable[[], int]) -> None:
        """Register the metrics; `num_unknown` returns how many requests bypass the proxy."""
        register = MetricsByInstance(registry)
        self._instance = instance_id
        self._replies = register.counter("block_proxy_requests", "Replies to the engine's clients.", "path", "code")
        unknown = register.gauge(
            "block_unknown_requests", "Requests on the engine that did not come through the proxy."
        )
        unknown.labels(instance_id).set_function(num_unknown)

    def count_reply(self, path: str, status: int) -> None:
        """Count a reply."""
        self._replies.labels(self._instance, path, str(status)).inc()
