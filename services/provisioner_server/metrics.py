"""Prometheus metrics of the provisioner."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

STATES = ("starting", "ready", "draining")


class ProvisionerMetrics:
    """The metrics of one provisioner."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything."""
        self.desired = Gauge(
            "block_desired_instances", "Desired number of instances; for HPA or KEDA.", ("pool",), registry=registry
        )
        self.max_instances = Gauge(
            "block_provisioner_max_instances", "Largest number of instances that may run.", ("pool",), registry=registry
        )
        self.instances = Gauge(
            "block_provisioner_instances", "Instances, by state.", ("pool", "state"), registry=registry
        )
        self.leads = Gauge("block_provisioner_leads", "1 for the leader.", registry=registry)
        self.actions = Counter(
            "block_provisioner_actions", "Actions, by kind and state.", ("kind", "state"), registry=registry
        )
        self.reports = Counter(
            "block_provisioner_reports", "Reports of schedulers, by whether they were used.", ("event", "taken"),
            registry=registry,
        )  # fmt: skip
        self.cold_start_s = Gauge(
            "block_cold_start_seconds", "Measured time from starting an instance until it is ready.", ("pool",),
            registry=registry,
        )  # fmt: skip
        self.forecast_s = Gauge(
            "block_forecast_p99_e2e_seconds", "99th percentile of recent forecasts.", ("pool",), registry=registry
        )
        self.arrivals = Gauge("block_arrivals_per_second", "Reported arrival rate.", ("pool",), registry=registry)
        self.tier_instances = Gauge(
            "block_provisioner_tier_instances", "Instances of each tier, and, without a tier, of the best-effort pool.",
            ("pool", "tier", "pending"), registry=registry,
        )  # fmt: skip
        self.tier_waiting = Gauge(
            "block_provisioner_tier_waiting", "Requests of a tier that wait at schedulers.", ("pool", "tier"),
            registry=registry,
        )  # fmt: skip
        self.given_up = Counter("block_instances_given_up", "Instances that never became ready.", registry=registry)
