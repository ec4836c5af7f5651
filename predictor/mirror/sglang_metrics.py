"""The parts of SGLang's /metrics and /server_info (0.5.23) that a mirror reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from predictor.config import require_count
from predictor.mirror.scraped_metrics import LABEL, LARGEST, MAX_LINE_CHARS, ScrapedMetrics, json_in, total_of, value_in

PREFIX = "sglang:"
_SAMPLE = re.compile(r"^sglang:([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]?Inf)(?: \d+)?$")

# SGLang's metrics by our names. Its counts of tokens grow when a request ends, so they show no progress in between.
METRIC_NAMES = {
    "running": "num_running_reqs",
    "waiting": "num_queue_reqs",
    "kv_usage": "token_usage",
    "prompt_tokens": "prompt_tokens_total",
    "preemptions": "num_retracted_requests_total",
    "prefix_hits": "cached_tokens_total",
}
SIZES = ("max_total_num_tokens", "page_size", "context_len")  # constants among the metrics
DEFAULT_MAX_PREFILL_TOKENS = 16384
POLICIES = {"fcfs": 0.0, "lpm": 1.0}

Settings = dict[str, Any]


def parse_sglang_metrics(text: str) -> ScrapedMetrics:
    """Parse Prometheus' text format; ranks are added up, and counts by priority, which are parts of others, skipped."""
    samples: dict[str, list[float]] = {}
    for line in text.splitlines():
        if not line.startswith(PREFIX) or len(line) > MAX_LINE_CHARS or (found := _SAMPLE.match(line)) is None:
            continue
        value = value_in(found[3])
        if value is not None and not dict(LABEL.findall(found[2] or "")).get("priority"):
            samples.setdefault(found[1], []).append(value)
    totals: dict[str, Any] = {}
    for name, spelling in METRIC_NAMES.items():
        if spelling in samples:
            totals[name] = total_of(name, samples[spelling])
    if "prefix_hits" in totals and "prompt_tokens" in totals:
        totals["prefix_queries"] = totals["prompt_tokens"]
    sizes = {name: int(max(samples[name])) for name in SIZES if samples.get(name)}
    return ScrapedMetrics(**totals, settings=_pool_settings(sizes), updates_rarely=True)


def _pool_settings(sizes: Mapping[str, int]) -> Settings:
    """Return the settings of the KV pool: a page is a block."""
    settings: Settings = {}
    page, tokens = sizes.get("page_size", 0), sizes.get("max_total_num_tokens", 0)
    if page > 0:
        settings["block_size"] = page
        if tokens >= 2 * page:
            settings["num_gpu_blocks"] = tokens // page
    if sizes.get("context_len", 0) > 0:
        settings["max_model_len"] = sizes["context_len"]
    return settings


def parse_server_info(body: bytes) -> tuple[Settings, tuple[str, ...]]:
    """Parse /server_info: the engine's settings, and in what they are approximated, a sentence for each.

    ValueError where it is not SGLang's. A field that is missing leaves the default.
    """
    info = json_in(body)
    if not isinstance(info, Mapping) or not any(name in info for name in ("max_total_num_tokens", "schedule_policy")):
        raise ValueError("server_info: has neither max_total_num_tokens nor schedule_policy, so it is not SGLang's")
    reader = _InfoReader(info)
    page = reader.count("page_size") or 1
    sizes = {"page_size": page, "max_total_num_tokens": reader.count("max_total_num_tokens") or 0}
    settings: Settings = {"block_size": page, **_pool_settings(sizes)}
    seats = reader.count_of_rank("effective_max_running_requests_per_dp") or reader.count("max_running_requests")
    if seats:
        settings["max_num_seqs"] = seats
    max_prefill = reader.count("max_prefill_tokens") or DEFAULT_MAX_PREFILL_TOKENS
    chunk = reader.count("chunked_prefill_size")  # -1: off
    settings["enable_chunked_prefill"] = chunk != 0
    settings["max_num_batched_tokens"] = -(-(chunk or max_prefill) // page) * page
    settings["enable_prefix_caching"] = not info.get("disable_radix_cache", False)
    settings["async_scheduling"] = not info.get("disable_overlap_schedule", False)
    given = info.get("schedule_policy", "fcfs")
    policy = given if isinstance(given, str) else ""
    if policy not in POLICIES:
        reader.notes.append(f"SGLang's schedule_policy {_shown(given)} is forecast as fcfs")
    if info.get("enable_priority_scheduling"):
        reader.notes.append("SGLang's priority scheduling is forecast as first come, first served")
    if info.get("speculative_algorithm"):
        reader.notes.append("SGLang's speculative decoding is forecast as decoding of one token a step")
    settings["batcher_options"] = {
        "longest_prefix_match": POLICIES.get(policy, 0.0),
        "max_prefill_tokens": float(max_prefill),
        "mixed_chunk": 1.0 if info.get("enable_mixed_chunk") else 0.0,
        "schedule_conservativeness": reader.number("schedule_conservativeness", 1.0),
    }
    return settings, tuple(reader.notes)


class _InfoReader:
    """Reads fields of /server_info, and notes those that are missing or unusable."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info = info
        self.notes: list[str] = []

    def count(self, name: str) -> int | None:
        """Return a count; None where the field says that there is no such limit, or is unusable."""
        value = self.info.get(name)
        if name == "chunked_prefill_size" and type(value) is int and value <= 0:
            return 0
        return self._checked(name, value)

    def count_of_rank(self, name: str) -> int | None:
        """Return a count of the first scheduler's own state, without a note where it is missing."""
        states = self.info.get("internal_states")
        first = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
        return self._checked(name, first[name]) if name in first else None

    def number(self, name: str, default: float) -> float:
        """Return a number of at least 0."""
        value = self.info.get(name, default)
        if type(value) in (int, float) and 0 <= value <= LARGEST:
            return float(value)
        self.notes.append(f"{name} is {_shown(value)} in SGLang's /server_info, so {default:g} is assumed")
        return default

    def _checked(self, name: str, value: object) -> int | None:
        try:
            require_count(name, value)
        except ValueError:
            state = "missing" if value is None else _shown(value)
            self.notes.append(f"{name} is {state} in SGLang's /server_info, so a default is assumed")
            return None
        assert isinstance(value, int)
        return value


def _shown(value: object) -> str:
    """Return a short text for a value of JSON."""
    return f"{str(value)[:40]!r}" if isinstance(value, str | int | float) else f"of type {type(value).__name__}"
