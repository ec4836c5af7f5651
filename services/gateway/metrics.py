"""Prometheus metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.attainment import AttainmentTally, filled

GROUP = ("class", "priority")
TARGET = ("target", "class", "priority")
LATENCIES_S = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0,
)  # fmt: skip
DECISIONS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HAND_OVERS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class GatewayMetrics:
    """Counters and histograms under block_gateway_*; labelled children are made once, as they are used per request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything."""
        ProcessCollector(registry=registry)
        self.registry = registry
        self.requests = Counter(
            "block_gateway_requests", "Replies, by path and status.", ("path", "status"), registry=registry
        )
        self.ttft = Histogram(
            "block_gateway_ttft_seconds", "From a request's arrival to the first event of its stream.",
            buckets=LATENCIES_S, registry=registry,
        )  # fmt: skip
        self.e2e = Histogram(
            "block_gateway_e2e_seconds", "From a request's arrival to the end of its answer.",
            buckets=LATENCIES_S, registry=registry,
        )  # fmt: skip
        self.decision = Histogram(
            "block_gateway_decision_seconds", "Time until the destination of a request is known.",
            buckets=DECISIONS_S, registry=registry,
        )  # fmt: skip
        self.prefill = Histogram(
            "block_gateway_prefill_seconds", "From sending a prefill leg to its reply.", buckets=LATENCIES_S,
            registry=registry,
        )  # fmt: skip
        self.hand_over = Histogram(
            "block_gateway_hand_over_seconds", "From the reply to a prefill leg to the request to the decode instance.",
            buckets=HAND_OVERS_S, registry=registry,
        )  # fmt: skip
        self.prefills = Counter(
            "block_gateway_prefill_legs",
            "Prefill legs: KV blocks are held (held) or not (no_blocks), the reply is invalid, the request is refused, "
            "the instance failed, the leg is skipped because one engine serves the request, or the client left.",
            ("result",),
            registry=registry,
        )
        self.output_tokens = Counter("block_gateway_output_tokens", "Tokens passed on.", registry=registry)
        self.retries = Counter(
            "block_gateway_retries", "Requests sent to another engine, by reason.", ("why",), registry=registry
        )
        self.broken = Counter("block_gateway_streams_broken", "Streams that ended in an error.", registry=registry)
        self.clients_left = Counter(
            "block_gateway_clients_left",
            "Clients that disconnected early.",
            registry=registry,
        )
        self.last_resort = Counter(
            "block_gateway_last_resort", "Requests placed without a scheduler.", ("how",), registry=registry
        )
        self.scheduler_failures = Counter(
            "block_gateway_scheduler_failures", "Calls to schedulers that failed.", ("scheduler", "code"),
            registry=registry,
        )  # fmt: skip
        self.releases = Counter(
            "block_gateway_releases",
            "Ends of requests: reported (told) or lost.",
            ("result",),
            registry=registry,
        )
        self.released = self.releases.labels("told")
        self.lost = self.releases.labels("lost")
        self._under_way = Gauge("block_gateway_requests_under_way", "Requests in the gateway.", registry=registry)
        self._waiting = Gauge("block_gateway_releases_waiting", "Ends of requests not reported yet.", registry=registry)
        self._counts: dict[tuple[str, int], Counter] = {}
        self.attainment = AttainmentTally()
        registry.register(AttainmentCollector(self.attainment))

    def watch(self, under_way: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the gauges when metrics are collected."""
        self._under_way.set_function(under_way)
        self._waiting.set_function(waiting)

    def replied(self, path: str, status: int) -> None:
        """Count a reply."""
        child = self._counts.get((path, status))
        if child is None:
            child = self._counts[path, status] = self.requests.labels(path, str(status))
        child.inc()


class AttainmentCollector(Collector):
    """Exposes what streamed responses to requests with targets attained."""

    def __init__(self, tally: AttainmentTally) -> None:
        """Read from a tally."""
        self._tally = tally

    def collect(self) -> Iterable[Metric]:
        """Return all counters."""
        return attainment_families(self._tally)


def attainment_families(tally: AttainmentTally) -> tuple[Metric, ...]:
    """Write a tally as counters."""
    tokens_due = CounterMetricFamily(
        "block_gateway_tokens_due", "Tokens with a deadline, of streamed responses.", labels=GROUP
    )
    tokens_on_time = CounterMetricFamily(
        "block_gateway_tokens_on_time", "Tokens that came by their deadlines.", labels=GROUP
    )
    possible_gain = CounterMetricFamily(
        "block_gateway_possible_gain", "Tokens with a deadline, times the weights of their requests.", labels=GROUP
    )
    gain = CounterMetricFamily(
        "block_gateway_gain", "Tokens that came by their deadlines, times the weights of their requests.", labels=GROUP
    )
    targets = CounterMetricFamily(
        "block_gateway_targets",
        "Requests with a target: ttft, tpot (the mean), slo (one or both of them), deadlines (of every token).",
        labels=TARGET,
    )
    attained = CounterMetricFamily("block_gateway_targets_attained", "Requests that attained a target.", labels=TARGET)
    return filled(tally, (tokens_due, tokens_on_time, possible_gain, gain, targets, attained))
