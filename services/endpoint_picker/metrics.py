"""Prometheus metrics of the endpoint picker."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from services.latency_buckets import DECISIONS_S, LATENCIES_S


class PickerMetrics:
    """Counters and histograms under block_picker_*."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything."""
        ProcessCollector(registry=registry)
        self.registry = registry
        self.picks = Counter(
            "block_picker_picks",
            "Requests for which endpoints were chosen: by body and headers (placed), by headers alone (by_headers), "
            "any endpoint, as the request is no completion (any), or those that a test names (test).",
            ("how",),
            registry=registry,
        )
        self.refused = Counter(
            "block_picker_refused",
            "Requests that were answered without an endpoint, by status and reason: rejected-no-endpoints, "
            "rejected-saturated and rejected-ttl-expired as the proxy gets them, invalid, or failed, for any other.",
            ("status", "reason"),
            registry=registry,
        )
        self.responses = Counter(
            "block_picker_responses", "Responses of endpoints, or of the proxy without them, by status.", ("status",),
            registry=registry,
        )  # fmt: skip
        self.served_elsewhere = Counter(
            "block_picker_served_elsewhere",
            "Requests that another endpoint than the first one served: a further one of the list (retried), or one "
            "that no instance has (unknown).",
            ("endpoint",),
            registry=registry,
        )
        self.stream_errors = Counter(
            "block_picker_stream_errors",
            "Streams of a proxy that ended in an error: its messages are invalid (protocol), or the picker has a "
            "defect (internal).",
            ("why",),
            registry=registry,
        )
        self.clients_left = Counter(
            "block_picker_clients_left", "Requests whose clients disconnected early.", registry=registry
        )
        self.ignored_objectives = Counter(
            "block_picker_ignored_objectives", "Requests with an objective that is not known.", registry=registry
        )
        self.decision = Histogram(
            "block_picker_decision_seconds", "From the whole request to its endpoints.", buckets=DECISIONS_S,
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "block_picker_ttft_seconds", "From a request's arrival to the first part of its stream.",
            buckets=LATENCIES_S, registry=registry,
        )  # fmt: skip
        self.e2e = Histogram(
            "block_picker_e2e_seconds", "From a request's arrival to the end of its response.", buckets=LATENCIES_S,
            registry=registry,
        )  # fmt: skip
        self.output_tokens = Counter("block_picker_output_tokens", "Tokens of responses.", registry=registry)
        self._under_way = Gauge(
            "block_picker_requests_under_way", "Requests that a proxy has a stream open for.", registry=registry
        )

    def watch(self, under_way: Callable[[], float]) -> None:
        """Read the gauge when metrics are collected."""
        self._under_way.set_function(under_way)
