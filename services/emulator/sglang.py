"""The HTTP surface of an emulated SGLang engine (0.5.23), where it differs from vLLM's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from predictor.config import EngineConfig
from services.emulator.app import Emulator
from services.emulator.driver import Driver
from services.emulator.metrics import EngineMetrics, Gauges, attainment_families
from services.emulator.openai import ParsedRequest, Served
from services.emulator.replies import CompletionReply, ReplyWriter
from services.emulator.request_bodies import CHAT
from services.http.application import JSON, Call

VERSION = "0.5.23+block.emulator"
LOG_INTERVAL = 40  # decodes between two updates of the gauges (`decode_log_interval`)
NOT_SERVED = ("/version", "/load", "/ping")
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Number of prefill tokens processed."),
    "generation_tokens": ("generation_tokens", "Number of generation tokens processed."),
    "prefix_cache_hits": ("cached_tokens", "Number of cached prompt tokens by source (device/host/storage)."),
}


class SglangReply(CompletionReply):
    """Writes a response as SGLang does: its id has no prefix, and `matched_stop` is the reason of a stop."""

    def __init__(self, request: ParsedRequest, created_s: int) -> None:
        """Write the constant parts."""
        self._is_sglang_chat = request.kind == CHAT
        super().__init__(request, created_s)

    def events(self, start: int, end: int, cached_tokens: int = 0) -> bytes:
        """Return the events of tokens, in SGLang's fields."""
        return self._renamed(super().events(start, end, cached_tokens))

    def first(self) -> bytes:
        """Return the events before the first token."""
        return self._renamed(super().first())

    def whole(self, cached_tokens: int, kv_transfer_params: dict[str, Any] | None = None, /) -> bytes:
        """Return the response in one piece."""
        reply = json.loads(super().whole(cached_tokens, kv_transfer_params))
        usage = {name: reply["usage"][name] for name in ("prompt_tokens", "total_tokens", "completion_tokens")}
        usage |= {"prompt_tokens_details": None, "reasoning_tokens": 0}
        choices = []
        for choice in reply["choices"]:
            kept = {name: choice[name] for name in ("index", "text", "logprobs", "finish_reason") if name in choice}
            if "message" in choice:
                message = choice["message"]
                kept["message"] = {name: message[name] for name in ("role", "content")} | {"tool_calls": None}
            choices.append({**kept, "matched_stop": choice["stop_reason"]})
        names = ("id", "object", "created", "model")
        about = {name: reply[name] for name in names} | {"id": self._request.request_id}
        return _json({**about, "choices": choices, "usage": usage, "metadata": {"weight_version": "default"}})

    def _renamed(self, events: bytes) -> bytes:
        prefix = b'"id":"chatcmpl-' if self._is_sglang_chat else b'"id":"cmpl-'
        return events.replace(prefix, b'"id":"').replace(b'"stop_reason":', b'"matched_stop":')


class SglangEmulator(Emulator):
    """Serves one emulated SGLang engine."""

    def serve_as_sglang(self, config: EngineConfig) -> None:
        """Serve SGLang's paths in place of vLLM's own ones."""
        self._config = config
        self.routes = {path: methods for path, methods in self.routes.items() if path not in NOT_SERVED} | {
            "/v1/models": {"GET": self._sglang_models},
            "/health_generate": {"GET": self._health},
            "/server_info": {"GET": self._server_info},
            "/get_server_info": {"GET": self._server_info},
            "/model_info": {"GET": self._model_info},
            "/get_model_info": {"GET": self._model_info},
        }

    def _reply(self, request: ParsedRequest) -> ReplyWriter:
        writer = super()._reply(request)
        return SglangReply(request, int(time.time())) if isinstance(writer, CompletionReply) else writer

    async def _sglang_models(self, call: Call) -> None:
        card = {
            "id": self.served.model, "object": "model", "created": self._created_s, "owned_by": "sglang",
            "root": self.served.model, "parent": None, "max_model_len": self.served.max_model_len,
        }  # fmt: skip
        await call.reply(200, JSON, _json({"object": "list", "data": [card]}))

    async def _server_info(self, call: Call) -> None:
        await call.reply(200, JSON, _json(server_info(self._config, self.served.model)))

    async def _model_info(self, call: Call) -> None:
        info = {"model_path": self.served.model, "is_generation": True, "weight_version": "default"}
        await call.reply(200, JSON, _json(info))


def sglang_emulator(driver: Driver, served: Served, *, max_body_bytes: int) -> SglangEmulator:
    """Make the HTTP surface of an emulated SGLang engine."""
    config = driver.engine.config
    exposition = SglangExposition(driver.metrics, config, served.model, gauges=driver.gauges)
    emulator = SglangEmulator(driver, served, exposition, max_body_bytes=max_body_bytes)
    emulator.serve_as_sglang(config)
    return emulator


def server_info(config: EngineConfig, model: str) -> dict[str, Any]:
    """Return what /server_info says about an engine's scheduler."""
    options = config.batcher_options
    max_prefill = int(options.get("max_prefill_tokens", config.max_num_batched_tokens))
    return {
        "model_path": model,
        "served_model_name": model,
        "page_size": config.block_size,
        "max_total_num_tokens": config.num_gpu_blocks * config.block_size,
        "max_running_requests": config.max_num_seqs,
        "max_req_input_len": config.max_model_len - 6,
        "context_length": config.max_model_len,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "max_prefill_tokens": max_prefill if config.enable_chunked_prefill else config.max_num_batched_tokens,
        "schedule_policy": "lpm" if options.get("longest_prefix_match") else "fcfs",
        "schedule_conservativeness": options.get("schedule_conservativeness", 1.0),
        "enable_mixed_chunk": bool(options.get("mixed_chunk")),
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_overlap_schedule": not config.async_scheduling,
        "enable_priority_scheduling": False,
        "speculative_algorithm": None,
        "internal_states": [{"effective_max_running_requests_per_dp": config.max_num_seqs}],
        "version": VERSION,
    }


class SglangExposition(Collector):
    """Writes an engine's metrics as SGLang does; its gauges change with prefills, and with every 40th decode."""

    def __init__(
        self, metrics: EngineMetrics, config: EngineConfig, model: str, *, gauges: Callable[[], Gauges]
    ) -> None:
        """Label everything with the model; `gauges` returns the engine's present ones."""
        self._metrics, self._config, self._read = metrics, config, gauges
        self._labels = {"model_name": model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        self._gauges: Gauges | None = None
        self._now: Gauges | None = None
        self._shown_at = (0, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the values in Prometheus' text format."""
        gauges = self._read()
        at = (self._metrics.counts["prompt_tokens"], self._num_steps() // LOG_INTERVAL)
        is_idle = gauges.num_running + gauges.num_waiting == 0
        if self._gauges is None or is_idle or at != self._shown_at:
            self._gauges, self._shown_at = gauges, at
        self._now = gauges
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Describe nothing, as nothing is known before the engine runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        gauges, now, config = self._gauges, self._now, self._config
        if gauges is None or now is None:
            return
        capacity = config.num_gpu_blocks * config.block_size
        yield self._gauge("num_running_reqs", "The number of running requests.", gauges.num_running)
        yield self._gauge("num_queue_reqs", "The number of requests in the waiting queue.", gauges.num_waiting)
        yield self._gauge("token_usage", "The token usage.", gauges.kv_cache_usage)
        used = round(gauges.kv_cache_usage * capacity)
        yield self._gauge("num_used_tokens", "The number of used tokens.", used)
        queries, hits = (self._metrics.counts[name] for name in ("prefix_cache_queries", "prefix_cache_hits"))
        yield self._gauge("cache_hit_rate", "The prefix cache hit rate.", hits / queries if queries else 0.0)
        yield self._gauge("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", capacity)
        yield self._gauge("page_size", "Page size of the KV cache.", config.block_size)
        yield self._gauge("context_len", "Context length of the model.", config.max_model_len)
        retracted = "Total number of retracted requests."
        yield self._counter("num_retracted_requests", retracted, now.num_preemptions)
        for name, (shown, help_text) in COUNTERS.items():
            yield self._counter(shown, help_text, self._metrics.counts[name])
        yield GaugeMetricFamily(
            "block_emulator_lag_seconds", "How late the emulator is with the engine's last step.", value=now.lag_s
        )
        yield from attainment_families(self._metrics.attainment)

    def _num_steps(self) -> int:
        buckets, _ = self._metrics.histograms["iteration_tokens_total"].buckets()
        return int(buckets[-1][1])

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"sglang:{name}", help_text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"sglang:{name}", help_text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
