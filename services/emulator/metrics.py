"""Prometheus metrics of an emulated engine, with vLLM's names; times are those of the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from predictor.config import FETCHING_ROLES, EngineConfig
from predictor.gain import missed, response_attainment
from predictor.outcome import Outcome
from predictor.request import RequestFacts, Slo
from predictor.state import ARRIVED, FETCH_FAILED, FETCHED, FETCHING, LOST, TO_FETCH
from services.attainment import AttainmentTally, filled
from services.bulk_histogram import BulkHistogram
from services.emulator.kv_transfers import TransferCounts
from services.emulator.speculation import DraftCounts

# vLLM 0.32 v1/metrics/buckets.py
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
           1920.0, 7680.0)  # fmt: skip
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
NIXL_TIME = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
NIXL_BYTES = tuple(2.0**power for power in range(11, 35, 2))
NIXL_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
ABORTED, ERROR = "abort", "error"
GROUP = ("class", "priority")
TARGET = ("target", "class", "priority")
FINISH_REASONS = ("stop", "length", ABORTED, ERROR, "repetition")
REFUSED_FOR_LENGTH = "max_num_queued_reqs"

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", TTFT),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", INTER_TOKEN),
    "request_time_per_output_token_seconds": ("Histogram of seconds per output token per request.", INTER_TOKEN),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", LATENCY),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", LATENCY),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", LATENCY),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", LATENCY),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", LATENCY),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", ITERATION_TOKENS),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", PREEMPTIONS),
    "request_prompt_tokens": ("Number of prefill tokens processed.", ()),
    "request_generation_tokens": ("Number of generation tokens processed.", ()),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", ()),
}
COUNTERS = {
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": "Prefix cache queries to other engines, in terms of number of queried tokens.",
    "external_prefix_cache_hits": "Prefix cache hits on other engines, in terms of number of cached tokens.",
}
# of engines with a KV connector
NIXL_HISTOGRAMS = {
    "nixl_xfer_time_seconds": ("Histogram of transfer duration for NIXL KV Cache transfers.", NIXL_TIME),
    "nixl_bytes_transferred": ("Histogram of bytes transferred per NIXL KV Cache transfers.", NIXL_BYTES),
    "nixl_num_descriptors": ("Histogram of number of descriptors per NIXL KV Cache transfers.", NIXL_DESCRIPTORS),
}
UNDER_WAY = (FETCHING, ARRIVED, LOST)
FETCH_STAGES = {
    "waiting_to_start": (TO_FETCH,), "in_progress": UNDER_WAY, "completed_waiting": (FETCHED, FETCH_FAILED),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The present state of the engine."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    lag_s: float
    num_by_stage: Sequence[int]  # waiting requests by the stage of their transfer, as `predictor.state` numbers them
    num_held: int  # finished prefills whose KV blocks are held
    running_adapters: Sequence[str] = ()
    waiting_adapters: Sequence[str] = ()

    def num_at(self, stages: Iterable[int]) -> int:
        """Return how many waiting requests are at one of these stages."""
        return int(sum(self.num_by_stage[stage] for stage in stages))


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Counters and histograms of an engine."""

    max_model_len: int
    speed: float
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    num_refused: int = 0
    attainment: AttainmentTally = field(default_factory=AttainmentTally)
    histograms: dict[str, BulkHistogram] = field(init=False)

    def __post_init__(self) -> None:
        """Make the histograms; those of tokens go up to the model's length."""
        tokens, all_of_them = one_two_five(self.max_model_len), HISTOGRAMS | NIXL_HISTOGRAMS
        self.histograms = {name: BulkHistogram(bounds or tokens) for name, (_, bounds) in all_of_them.items()}

    def first_tokens(
        self, ttft_s: np.ndarray, num_prompt_tokens: int, num_hit_tokens: int, num_fetched_tokens: int
    ) -> None:
        """Count requests that got their first token; times are the engine's."""
        self.histograms["time_to_first_token_seconds"].observe_many(ttft_s / self.speed)
        self.counts["prompt_tokens"] += num_prompt_tokens
        self.counts["prefix_cache_queries"] += num_prompt_tokens
        self.counts["prefix_cache_hits"] += num_hit_tokens
        self.counts["external_prefix_cache_queries"] += num_fetched_tokens
        self.counts["external_prefix_cache_hits"] += num_fetched_tokens

    def fetched(self, seconds: float, num_bytes: int, num_blocks: int) -> None:
        """Count KV blocks that have been fetched, each with one descriptor."""
        self.histograms["nixl_xfer_time_seconds"].observe(seconds)
        self.histograms["nixl_bytes_transferred"].observe(num_bytes)
        self.histograms["nixl_num_descriptors"].observe(num_blocks)

    def more_tokens(self, gaps_s: np.ndarray) -> None:
        """Count tokens, by the time since the token before."""
        self.histograms["inter_token_latency_seconds"].observe_many(gaps_s / self.speed)

    def step(self, num_tokens: int, num_sampled: int) -> None:
        """Count a step."""
        self.histograms["iteration_tokens_total"].observe(num_tokens)
        self.counts["generation_tokens"] += num_sampled

    def generated(self, num_tokens: int) -> None:
        """Count tokens of an engine with speculative decoding, which its steps do not count."""
        self.counts["generation_tokens"] += num_tokens

    def ended(self, request: RequestFacts, outcome: Outcome, reason: str, max_tokens: int) -> None:
        """Count a request that has ended."""
        self.finished[reason] += 1
        if request.slo is not None and outcome.finished_s is not None and reason != ABORTED:
            attained = response_attainment(
                request.slo,
                num_tokens=outcome.output_tokens,
                tokens_on_time=outcome.tokens_on_time or 0,
                ttft_s=outcome.ttft_s,
                tpot_s=outcome.tpot_s,
            )
            self.attainment.add(
                attained, request_class=request.request_class, priority=request.priority, weight=request.weight
            )
        see = self.histograms
        see["request_prompt_tokens"].observe(outcome.prompt_tokens)
        see["request_generation_tokens"].observe(outcome.output_tokens)
        see["request_params_max_tokens"].observe(max_tokens)
        see["request_num_preemptions"].observe(outcome.num_preemptions)
        scheduled_s, first_s, finished_s = outcome.scheduled_s, outcome.first_token_s, outcome.finished_s
        if scheduled_s is None or first_s is None or finished_s is None:
            return
        see["e2e_request_latency_seconds"].observe((finished_s - outcome.arrival_s) / self.speed)
        see["request_queue_time_seconds"].observe((scheduled_s - outcome.arrival_s) / self.speed)
        see["request_inference_time_seconds"].observe((finished_s - scheduled_s) / self.speed)
        see["request_prefill_time_seconds"].observe((first_s - scheduled_s) / self.speed)
        see["request_decode_time_seconds"].observe((finished_s - first_s) / self.speed)
        if outcome.tpot_s is not None:
            see["request_time_per_output_token_seconds"].observe(outcome.tpot_s / self.speed)

    def refused(self, priority: int, facts: Mapping[str, Any]) -> None:
        """Count a request that the engine has no room for."""
        self.num_refused += 1
        slo: Slo | None = facts["slo"]
        if slo is not None:
            self.attainment.add(
                missed(slo, 1),
                request_class=facts["request_class"],
                priority=priority,
                weight=facts.get("weight", 1.0),
            )


class Exposition(Collector):
    """Writes an engine's metrics as vLLM does."""

    def __init__(  # noqa: PLR0913 - what it writes
        self,
        metrics: EngineMetrics,
        config: EngineConfig,
        model: str,
        transfers: TransferCounts | None,
        drafts: DraftCounts | None = None,
        *,
        gauges: Callable[[], Gauges],
        rank: int = 0,
    ) -> None:
        """Label everything with the model and the rank.

        `transfers` are those of an engine with a KV connector, `drafts` those of one with speculative decoding.
        """
        self._metrics = metrics
        self._config = config
        self._transfers = transfers
        self._drafts = drafts
        self._labels = {"engine": str(rank), "model_name": model}
        self._started_s = time.time()
        self._gauges = gauges
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the present values in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Describe nothing, as nothing is known before the engine runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        gauges, metrics = self._gauges(), self._metrics
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", gauges.num_running)
        waiting = "Number of requests waiting to be processed."
        yield self._gauge("num_requests_waiting", waiting, gauges.num_waiting)
        yield self._by_reason(gauges)
        usage = "KV-cache usage. 1 means 100 percent usage."
        yield self._gauge("kv_cache_usage_perc", usage, gauges.kv_cache_usage)
        yield self._gauge("engine_sleep_state", "Engine sleep state; awake = 1.", 1, sleep_state="awake")
        yield self._cache_config()
        if self._config.max_loras:
            yield self._adapters(gauges)
        preemptions = "Cumulative number of preemption from the engine."
        yield self._counter("num_preemptions", preemptions, {None: gauges.num_preemptions})
        for name, help_text in COUNTERS.items():
            yield self._counter(name, help_text, {None: metrics.counts[name]})
        ended = "Count of successfully processed requests."
        yield self._counter("request_success", ended, metrics.finished, by="finished_reason")
        refused = "Number of admission attempts rejected by a queue limit."
        yield self._counter("admission_rejections", refused, {REFUSED_FOR_LENGTH: metrics.num_refused}, by="reason")
        for name, (help_text, _) in HISTOGRAMS.items():
            yield self._histogram(name, help_text)
        if self._transfers is not None:
            yield from self._transfer_families(gauges, self._transfers)
        if self._drafts is not None:
            yield from self._draft_families(self._drafts)
        lag = GaugeMetricFamily(
            "block_emulator_lag_seconds", "How late the emulator is with the engine's last step.", value=gauges.lag_s
        )
        yield lag
        yield from attainment_families(metrics.attainment)

    def _adapters(self, gauges: Gauges) -> Metric:
        """Return the adapters in labels, with the time as the value, as vLLM does."""
        labels = {
            "max_lora": str(self._config.max_loras),
            "waiting_lora_adapters": ",".join(gauges.waiting_adapters),
            "running_lora_adapters": ",".join(gauges.running_adapters),
        }
        help_text = "Running stats on lora requests."
        family = GaugeMetricFamily("vllm:lora_requests_info", help_text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), time.time())
        return family

    def _by_reason(self, gauges: Gauges) -> Metric:
        labels = (*self._labels, "reason")
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=labels)
        num_deferred = gauges.num_at(UNDER_WAY)
        family.add_metric((*self._labels.values(), "capacity"), gauges.num_waiting - num_deferred)
        family.add_metric((*self._labels.values(), "deferred"), num_deferred)
        return family

    def _transfer_families(self, gauges: Gauges, transfers: TransferCounts) -> Iterator[Metric]:
        for name, (help_text, _) in NIXL_HISTOGRAMS.items():
            yield self._histogram(name, help_text)
        failed = "Number of failed NIXL KV Cache transfers, including handshake and notification failures."
        yield self._counter("nixl_num_failed_transfers", failed, {None: transfers.num_failed_transfers})
        failed = "Number of failed NIXL KV Cache notifications."
        yield self._counter("nixl_num_failed_notifications", failed, {None: transfers.num_failed_notifications})
        expired = "Number of requests that had their KV expire."
        yield self._counter("nixl_num_kv_expired_reqs", expired, {None: transfers.num_expired})
        late = "Number of completion notifications for requests that were no longer tracked."
        yield self._counter("nixl_num_notifications_after_expiry", late, {None: transfers.num_late_notifications})
        if self._config.kv_role in FETCHING_ROLES:
            labels = (*self._labels, "stage")
            help_text = "Number of waiting requests by async KV load stage."
            family = GaugeMetricFamily("vllm:num_requests_kv_fetch_by_stage", help_text, labels=labels)
            for name, stages in FETCH_STAGES.items():
                family.add_metric((*self._labels.values(), name), gauges.num_at(stages))
            yield family
        yield GaugeMetricFamily(
            "block_emulator_held_prefills", "Finished prefills whose KV blocks are held for another engine.",
            value=gauges.num_held,
        )  # fmt: skip

    def _draft_families(self, drafts: DraftCounts) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Number of spec decoding drafts.", {None: drafts.num_drafts})
        tokens = "Number of draft tokens."
        yield self._counter("spec_decode_num_draft_tokens", tokens, {None: drafts.num_draft_tokens})
        accepted = "Number of accepted tokens."
        yield self._counter("spec_decode_num_accepted_tokens", accepted, {None: sum(drafts.accepted)})
        by_position = "Accepted tokens per draft position."
        counts = {str(position): count for position, count in enumerate(drafts.accepted)}
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", by_position, counts, by="position")

    def _histogram(self, name: str, help_text: str) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), *self._metrics.histograms[name].buckets())
        return family

    def _cache_config(self) -> Metric:
        config = self._config
        settings: dict[str, Any] = {
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": config.enable_prefix_caching,
            "engine": self._labels["engine"],
            "num_gpu_blocks": config.num_gpu_blocks,
        }
        help_text = "Information of the LLMEngine CacheConfig"
        family = GaugeMetricFamily("vllm:cache_config_info", help_text, labels=tuple(settings))
        family.add_metric([str(value) for value in settings.values()], 1)
        return family

    def _gauge(self, name: str, help_text: str, value: float, **more: str) -> Metric:
        labels = {**self._labels, **more}
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, values: Mapping[Any, int], by: str | None = None) -> Metric:
        """Make a counter of one value, or of several with one more label."""
        labels = [*self._labels, *([by] if by else [])]
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=labels)
        for value, count in values.items():
            family.add_metric([*self._labels.values(), *([value] if by else [])], count, created=self._started_s)
        return family


def attainment_families(tally: AttainmentTally) -> tuple[Metric, ...]:
    """Write a tally as counters."""
    tokens_due = CounterMetricFamily(
        "block_emulator_tokens_due", "Tokens with a deadline, of whole responses.", labels=GROUP
    )
    tokens_on_time = CounterMetricFamily(
        "block_emulator_tokens_on_time", "Tokens that came by their deadlines.", labels=GROUP
    )
    possible_gain = CounterMetricFamily(
        "block_emulator_possible_gain", "Tokens with a deadline, times the weights of their requests.", labels=GROUP
    )
    gain = CounterMetricFamily(
        "block_emulator_gain", "Tokens that came by their deadlines, times the weights of their requests.", labels=GROUP
    )
    targets = CounterMetricFamily(
        "block_emulator_targets",
        "Requests with a target: ttft, tpot (the mean), slo (one or both of them), deadlines (of every token).",
        labels=TARGET,
    )
    attained = CounterMetricFamily("block_emulator_targets_attained", "Requests that attained a target.", labels=TARGET)
    return filled(tally, (tokens_due, tokens_on_time, possible_gain, gain, targets, attained))


def one_two_five(largest: int) -> list[float]:
    """Return the bounds 1, 2, 5, 10, … up to `largest`, as vLLM has them for counts of tokens."""
    bounds: list[float] = []
    step = 1
    while step <= largest:
        bounds += [float(step * digit) for digit in (1, 2, 5) if step * digit <= largest]
        step *= 10
    return bounds
