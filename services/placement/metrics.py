"""Metrics of decisions, forecast fan-outs, reservations and outcomes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
HELD_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class SchedulerMetrics:
    """The metrics of one scheduler, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start from zero."""
        self.decision_s = Histogram(
            "block_decision_seconds",
            "From taking a request to the decision where it goes.",
            ("policy",),
            buckets=SECONDS,
            registry=registry,
        )
        self.decisions = Counter(
            "block_decisions", "Decisions, by what they rest on.", ("policy", "basis"), registry=registry
        )
        self.held = Gauge(
            "block_held_requests", "Requests that wait for an instance that admits them.", registry=registry
        )
        self.holds = Counter("block_holds", "Requests that were held, by why that ended.", ("end",), registry=registry)
        self.held_s = Histogram("block_held_seconds", "How long.", buckets=HELD_SECONDS, registry=registry)
        self.undecided = Counter("block_undecided", "Requests that could be sent nowhere.", registry=registry)
        self.fan_out_s = Histogram(
            "block_fan_out_seconds", "From asking all sidecars to the last answer.", buckets=SECONDS, registry=registry
        )
        self.sidecar_failures = Counter(
            "block_sidecar_failures", "Sidecars' failures to answer.", ("instance", "kind"), registry=registry
        )
        self.forecast_error = Summary(
            "block_scheduler_forecast_error_ratio",
            "|predicted - actual| / actual time to the end, of forecasts as sidecars made them.",
            ("instance",),
            registry=registry,
        )
        self.circuits_open = Gauge("block_sidecar_circuits_open", "Sidecars that are left alone.", registry=registry)
        self.instances = Gauge("block_instances", "Instances that are known.", registry=registry)
        self.reserves = Counter(
            "block_reservations", "Attempts to reserve, by what came of them.", ("result",), registry=registry
        )
        self.releases = Counter(
            "block_releases", "Reservations ended, by whether there was one.", ("released",), registry=registry
        )
        self.tags = Counter("block_scheduler_tags", "Lengths, by who told them.", ("source",), registry=registry)
        self.tagger_failures = Counter(
            "block_tagger_failures", "The tagger's failures to answer.", ("kind",), registry=registry
        )
        self.outcomes = Counter(
            "block_scheduler_outcomes", "Outcomes for the tagger, by whether it got them.", ("told",), registry=registry
        )
        self.recorded = Counter(
            "block_recorded_lines", "Decisions and outcomes recorded, or lost.", ("result",), registry=registry
        )
