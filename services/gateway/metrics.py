"""Prometheus metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protos.block.v1 import common_pb2
from services.attainment import AttainmentTally, ClientTally, filled
from services.bounded_label import BoundedLabel
from services.bulk_histogram import BulkHistogram
from services.latency_buckets import DECISIONS_S, LATENCIES_S, TOKEN_GAPS_S

GROUP = ("class", "priority")
TARGET = ("target", "class", "priority")
CLIENT = ("client", "tpot_slo")
HAND_OVERS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

# How an answer ended, as metrics name it.
REASONS = {
    common_pb2.FINISH_REASON_UNSPECIFIED: "unspecified",
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_FAILED: "failed",
}
INCOMPLETE = (common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_FAILED)


class GatewayMetrics:
    """Counters and histograms under block_gateway_*; labelled children are made once, as they are used per request."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register everything."""
        ProcessCollector(registry=registry)
        self.registry = registry
        self._register_answers(registry)
        self._register_prefill_legs(registry)
        self._register_ends(registry)
        self._register_failures(registry)
        self._register_releases(registry)
        self._counts: dict[tuple[str, int], Counter] = {}
        self._model_of = BoundedLabel()
        self._models: dict[str, ModelMetrics] = {}
        self.attainment, self.client_attainment = AttainmentTally(), ClientTally()
        registry.register(StreamCollector(self.attainment, self.client_attainment, self._models))

    def _register_answers(self, registry: CollectorRegistry) -> None:
        """Register replies and their times."""
        self.requests = Counter(
            "block_gateway_requests", "Replies, by path and status.", ("path", "status"), registry=registry
        )
        self._ttft = Histogram(
            "block_gateway_ttft_seconds", "From a request's arrival to the first event of its stream.", ("model",),
            buckets=LATENCIES_S, registry=registry,
        )  # fmt: skip
        self._e2e = Histogram(
            "block_gateway_e2e_seconds", "From a request's arrival to the end of its answer.", ("model",),
            buckets=LATENCIES_S, registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "block_gateway_tpot_seconds", "Mean time between the tokens of a streamed answer.", ("model",),
            buckets=TOKEN_GAPS_S, registry=registry,
        )  # fmt: skip
        self.decision = Histogram(
            "block_gateway_decision_seconds", "Time until the destination of a request is known.",
            buckets=DECISIONS_S, registry=registry,
        )  # fmt: skip

    def _register_prefill_legs(self, registry: CollectorRegistry) -> None:
        """Register prefill legs and hand-overs."""
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

    def _register_ends(self, registry: CollectorRegistry) -> None:
        """Register how answers end."""
        self._prompt_tokens = Counter(
            "block_gateway_prompt_tokens", "Tokens of the prompts of completed requests.", ("model",), registry=registry
        )
        self._output_tokens = Counter("block_gateway_output_tokens", "Tokens passed on.", ("model",), registry=registry)
        self._finished = Counter(
            "block_gateway_finished",
            "Answers, by how they ended: stop, length, cancelled (by the client), failed, or unspecified.",
            ("model", "reason"),
            registry=registry,
        )

    def _register_failures(self, registry: CollectorRegistry) -> None:
        """Register what follows where an engine, a scheduler or a client fails."""
        self.retries = Counter(
            "block_gateway_retries", "Requests sent to another engine, by reason.", ("why",), registry=registry
        )
        self.migrations = Counter(
            "block_gateway_migrations",
            "Requests that left their engine, by what followed: it failed, and they continued on another one "
            "(continued), it drained, and they moved to another one (planned), their end was missing only (ended), or "
            "why they broke: off, limit, migration_budget, no_instance, poison_suspect, or what about the request or "
            "its answer cannot be continued.",
            ("result",),
            registry=registry,
        )
        self.drain_stays = Counter(
            "block_gateway_drain_stays",
            "Requests that were to leave an instance that drains, and went on there, by reason: migration_budget, "
            "no_instance, limit, decode_leg, off, or what about the request or its answer cannot be continued.",
            ("reason",),
            registry=registry,
        )
        self.poison_suspects = Counter(
            "block_gateway_poison_suspects",
            "Requests of which two engines failed within 10 s after they got them.",
            registry=registry,
        )
        self.migration_pause = Histogram(
            "block_gateway_migration_pause_seconds",
            "From the failure of a stream's engine, or its planned move, to the first event of the next engine.",
            buckets=LATENCIES_S,
            registry=registry,
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

    def _register_releases(self, registry: CollectorRegistry) -> None:
        """Register the reports of ends, and what is under way."""
        self.releases = Counter(
            "block_gateway_releases",
            "Ends of requests: reported or lost.",
            ("result",),
            registry=registry,
        )
        self.released = self.releases.labels("reported")
        self.lost = self.releases.labels("lost")
        self._under_way = Gauge("block_gateway_requests_under_way", "Requests in the gateway.", registry=registry)
        self._waiting = Gauge("block_gateway_releases_waiting", "Ends of requests not reported yet.", registry=registry)

    def watch(self, under_way: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the gauges when metrics are collected."""
        self._under_way.set_function(under_way)
        self._waiting.set_function(waiting)

    def of_model(self, model: str) -> ModelMetrics:
        """Return the metrics of a model's answers."""
        model = self._model_of(model)
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(
                ttft=self._ttft.labels(model),
                e2e=self._e2e.labels(model),
                tpot=self._tpot.labels(model),
                prompt_tokens=self._prompt_tokens.labels(model),
                output_tokens=self._output_tokens.labels(model),
                finished={name: self._finished.labels(model, name) for name in REASONS.values()},
            )
        return found

    def replied(self, path: str, status: int) -> None:
        """Count a reply."""
        child = self._counts.get((path, status))
        if child is None:
            child = self._counts[path, status] = self.requests.labels(path, str(status))
        child.inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """The metrics of one model's answers."""

    ttft: Histogram
    e2e: Histogram
    tpot: Histogram
    prompt_tokens: Counter
    output_tokens: Counter
    finished: Mapping[str, Counter]
    inter_token: BulkHistogram = field(default_factory=lambda: BulkHistogram(TOKEN_GAPS_S))

    def ended(self, outcome: common_pb2.Outcome, trace_id: str) -> None:
        """Count the end of an answer; with the trace that records it, if any, as an exemplar."""
        exemplar = {"trace_id": trace_id} if trace_id else None
        self.finished[REASONS[outcome.finish_reason]].inc()
        self.output_tokens.inc(outcome.output_tokens)
        if outcome.HasField("ttft_s"):
            self.ttft.observe(outcome.ttft_s, exemplar)
        if outcome.finish_reason in INCOMPLETE:
            return
        self.prompt_tokens.inc(outcome.prompt_tokens)
        self.e2e.observe(outcome.e2e_s, exemplar)
        if outcome.HasField("tpot_s"):
            self.tpot.observe(outcome.tpot_s, exemplar)


class StreamCollector(Collector):
    """Exposes what streamed responses attained, and the times between their tokens."""

    def __init__(self, attainment: AttainmentTally, clients: ClientTally, models: Mapping[str, ModelMetrics]) -> None:
        """Read from tallies."""
        self._attainment, self._clients, self._models = attainment, clients, models

    def describe(self) -> Iterable[Metric]:
        """Return the metrics, so that some of them can be collected by name."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics."""
        gaps = HistogramMetricFamily(
            "block_gateway_inter_token_seconds",
            "Time between pieces of a streamed answer, for each token of the later one.",
            labels=("model",),
        )
        for model, metrics in self._models.items():
            gaps.add_metric((model,), *metrics.inter_token.buckets())
        requests = CounterMetricFamily(
            "block_gateway_slo_requests",
            "Requests with targets, by client and TPOT target in seconds (empty: none).",
            labels=CLIENT,
        )
        attained = CounterMetricFamily(
            "block_gateway_slo_attained", "Requests that attained all their targets.", labels=CLIENT
        )
        self._clients.fill(requests, attained)
        return (gaps, requests, attained, *attainment_families(self._attainment))


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
