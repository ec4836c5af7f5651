"""What a provisioner counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

STATES = ("starting", "ready", "draining")


class ProvisionerMetrics:
    """The metrics of one provisioner, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start from zero."""
        self.desired = Gauge(
            "block_desired_instances", "Instances that there should be; for HPA or KEDA.", ("pool",), registry=registry
        )
        self.instances = Gauge(
            "block_provisioner_instances", "Instances, by state.", ("pool", "state"), registry=registry
        )
        self.leads = Gauge("block_provisioner_leads", "1 for the one that may act.", registry=registry)
        self.actions = Counter(
            "block_provisioner_actions", "Actions, by what came of them.", ("kind", "state"), registry=registry
        )
        self.reports = Counter(
            "block_provisioner_reports", "What schedulers told, by what was made of it.", ("event", "taken"),
            registry=registry,
        )  # fmt: skip
        self.cold_start_s = Gauge(
            "block_cold_start_seconds", "From asking for an instance to its being ready, as learnt.", ("pool",),
            registry=registry,
        )  # fmt: skip
        self.forecast_s = Gauge(
            "block_forecast_p99_e2e_seconds", "Of what was lately forecast.", ("pool",), registry=registry
        )
        self.arrivals = Gauge("block_arrivals_per_second", "As told by schedulers.", ("pool",), registry=registry)
        self.given_up = Counter("block_instances_given_up", "Instances that never came up.", registry=registry)
