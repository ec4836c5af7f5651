"""Metrics of decisions, forecast fan-outs, reservations and outcomes."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from scheduler.admission.late_work import DEFERRED
from scheduler.instances import LATE
from scheduler.placement import Placement
from services.bounded_label import BoundedLabel
from services.latency_buckets import LATENCIES_S

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
HELD_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class SchedulerMetrics:
    """The metrics of one scheduler, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all metrics."""
        self.registry = registry
        self._instance_of, self._model_of = BoundedLabel(), BoundedLabel()
        self._register_decisions(registry)
        self._register_admission(registry)
        self._register_sidecars(registry)
        self._register_outcomes(registry)

    def _register_decisions(self, registry: CollectorRegistry) -> None:
        """Register metrics of decisions and placements."""
        self.decision_s = Histogram(
            "block_decision_seconds",
            "From receiving a request to its decision.",
            ("policy",),
            buckets=SECONDS,
            registry=registry,
        )
        self.decisions = Counter(
            "block_decisions", "Decisions, by their basis.", ("policy", "basis"), registry=registry
        )
        self._placements = Counter(
            "block_placements",
            "Requests and legs of requests placed, by instance and leg: serve (a whole request), prefill, decode.",
            ("instance", "leg"),
            registry=registry,
        )
        self._predicted_ttft_s = Histogram(
            "block_predicted_ttft_seconds",
            "Forecasts of the time to first token that requests were placed by.",
            ("model",),
            buckets=LATENCIES_S,
            registry=registry,
        )
        self._predicted_e2e_s = Histogram(
            "block_predicted_e2e_seconds",
            "Forecasts of the whole latency that requests were placed by.",
            ("model",),
            buckets=LATENCIES_S,
            registry=registry,
        )
        self._state_age_s = Histogram(
            "block_state_age_seconds",
            "Age of what was known of the chosen instance when the decision was made.",
            buckets=SECONDS,
            registry=registry,
        )
        self.disaggregations = Counter(
            "block_scheduler_disaggregations",
            "Decisions among instances with roles, by why the request has two legs or is served as a whole.",
            ("policy", "reason"),
            registry=registry,
        )

    def _register_admission(self, registry: CollectorRegistry) -> None:
        """Register metrics of requests that are held, shed or demoted, or for which there is no instance."""
        self.held = Gauge(
            "block_held_requests", "Requests that are held until an instance admits them.", registry=registry
        )
        self.holds = Counter(
            "block_holds", "Requests that were held, by how the hold ended.", ("end",), registry=registry
        )
        self.held_s = Histogram(
            "block_held_seconds", "How long requests were held.", buckets=HELD_SECONDS, registry=registry
        )
        self.undecided = Counter("block_undecided", "Requests for which there was no instance.", registry=registry)
        self.shed = Counter(
            "block_scheduler_shed",
            "Requests that were refused early, by reason: their targets cannot be kept (late), the admission queue is "
            "full (queue_full), they waited as long as they may (timeout), or the client or the class has too many "
            "waiting requests (tenant_limit, class_limit).",
            ("reason", "class"),
            registry=registry,
        )
        self.served_late = Counter(
            "block_scheduler_served_late",
            "Requests that were placed after they dropped their deadlines, by reason: these cannot be kept (late), "
            "or they take long under overload (deferred).",
            ("reason",),
            registry=registry,
        )
        for reason in (LATE, DEFERRED):
            self.served_late.labels(reason)  # 0 from the start, so that a rate counts the first request, too
        self.demoted = Counter(
            "block_scheduler_demoted",
            "Requests that went on as best effort, because no instance keeps their deadlines.",
            registry=registry,
        )

    def _register_sidecars(self, registry: CollectorRegistry) -> None:
        """Register metrics of calls of sidecars: forecasts, reservations and releases."""
        self.fan_out_s = Histogram(
            "block_fan_out_seconds", "From requesting forecasts to the last reply.", buckets=SECONDS, registry=registry
        )
        self.sidecar_failures = Counter(
            "block_sidecar_failures", "Calls of sidecars that failed.", ("instance", "kind"), registry=registry
        )
        self.forecast_error = Summary(
            "block_scheduler_forecast_error_ratio",
            "|predicted - actual| / actual latency, of uncorrected forecasts.",
            ("instance",),
            registry=registry,
        )
        self.circuits_open = Gauge("block_sidecar_circuits_open", "Sidecars whose circuit is open.", registry=registry)
        self.instances = Gauge("block_instances", "Instances in the list.", registry=registry)
        self.reserves = Counter(
            "block_reservations", "Attempts to reserve, by their result.", ("result",), registry=registry
        )
        self.releases = Counter(
            "block_releases", "Releases, by whether there was a reservation.", ("released",), registry=registry
        )

    def _register_outcomes(self, registry: CollectorRegistry) -> None:
        """Register metrics of tags, outcomes, drains and recordings."""
        self.tags = Counter(
            "block_scheduler_tags", "Response lengths, by their source.", ("source",), registry=registry
        )
        self.tagger_failures = Counter(
            "block_tagger_failures", "Calls of the tagger that failed.", ("kind",), registry=registry
        )
        self.outcomes = Counter(
            "block_scheduler_outcomes", "Outcomes for the tagger, by result.", ("result",), registry=registry
        )
        self.drain_stays = Counter(
            "block_generate_drain_stays",
            "Streams of Generate that were to leave an instance that drains, and went on there, by reason.",
            ("reason",),
            registry=registry,
        )
        self.recorded = Counter(
            "block_recorded_lines", "Decisions and outcomes recorded, or lost.", ("result",), registry=registry
        )

    def placed(self, model: str, placement: Placement, age_s: float | None) -> None:
        """Count a request that was placed, its forecast, and the age of the state that was known of the instance."""
        for leg in placement.legs:
            self._placements.labels(self._instance_of(leg.instance_id), leg.kind).inc()
        if age_s is not None:
            self._state_age_s.observe(age_s)
        forecast = placement.forecast
        if forecast is not None and math.isfinite(forecast.e2e_s):
            label = self._model_of(model)
            self._predicted_ttft_s.labels(label).observe(forecast.ttft_s)
            self._predicted_e2e_s.labels(label).observe(forecast.e2e_s)
