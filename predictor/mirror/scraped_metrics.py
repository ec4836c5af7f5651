"""The parts of an engine's /metrics and /v1/models that a mirror reads: a few totals, and engine settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from predictor.config import MAX_LORAS, PRODUCER_AND_CONSUMER

MAX_LINE_CHARS = 4096

_SAMPLE = re.compile(r"^vllm:([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]?Inf)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# vLLM's metrics by our names; the first spelling that is present counts
METRIC_NAMES = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "fetching": ("num_requests_kv_fetch_by_stage",),  # at the stage `in_progress`
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prompt_tokens": ("prompt_tokens_total",),
    "generation_tokens": ("generation_tokens_total",),
    "preemptions": ("num_preemptions_total",),
    "prefix_queries": ("prefix_cache_queries_total",),
    "prefix_hits": ("prefix_cache_hits_total",),
    "created_s": ("prompt_tokens_created",),
}
SETTINGS: dict[str, Callable[[str], int | bool]] = {
    "num_gpu_blocks": int,
    "block_size": int,
    "enable_prefix_caching": lambda text: text == "True",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapedMetrics:
    """One scrape of /metrics; a metric that the engine does not export is None."""

    running: float | None = None
    waiting: float | None = None
    fetching: float | None = None
    kv_usage: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    created_s: float | None = None
    settings: Mapping[str, int | bool | str] = field(default_factory=dict)

    def shows_restart_since(self, before: ScrapedMetrics) -> bool:
        """Return whether the engine restarted in between: its counters are newer, or lower, than before."""
        if self.created_s is not None and before.created_s is not None and self.created_s > before.created_s:
            return True
        for name in ("prompt_tokens", "generation_tokens", "preemptions"):
            count, earlier = getattr(self, name), getattr(before, name)
            if count is not None and earlier is not None and count < earlier:
                return True
        return False

    def shows_progress_since(self, before: ScrapedMetrics) -> bool:
        """Return whether the engine computed tokens in between."""
        return (self.prompt_tokens, self.generation_tokens) != (before.prompt_tokens, before.generation_tokens)


def parse_metrics(text: str) -> ScrapedMetrics:
    """Parse Prometheus' text format; several engines behind one address are added up, invalid lines are skipped."""
    samples: dict[str, list[float]] = {}
    settings: dict[str, int | bool | str] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:") or len(line) > MAX_LINE_CHARS or (found := _SAMPLE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        if name == "cache_config_info":
            settings.update(_settings(dict(_LABEL.findall(labels))))
        elif name == "lora_requests_info":
            settings.update(_adapter_settings(dict(_LABEL.findall(labels))))
        elif math.isfinite(value):
            if name in METRIC_NAMES["fetching"] and dict(_LABEL.findall(labels)).get("stage") != "in_progress":
                continue
            samples.setdefault(name, []).append(value)
    if METRIC_NAMES["fetching"][0] in samples:
        settings["kv_role"] = PRODUCER_AND_CONSUMER  # only engines that fetch have it
    totals: dict[str, float] = {}
    for name, spellings in METRIC_NAMES.items():
        values = next((samples[spelling] for spelling in spellings if spelling in samples), None)
        if values is not None:
            totals[name] = max(values) if name in ("kv_usage", "created_s") else math.fsum(values)
    return ScrapedMetrics(**totals, settings=settings)


def _settings(labels: Mapping[str, str]) -> dict[str, int | bool | str]:
    settings: dict[str, int | bool | str] = {}
    for name, parse in SETTINGS.items():
        try:
            if name in labels:
                settings[name] = parse(labels[name])
        except ValueError:  # "None" before the engine has set it
            continue
    return settings


def _adapter_settings(labels: Mapping[str, str]) -> dict[str, int | bool | str]:
    """Return how many LoRA adapters a step may have, by the labels of `vllm:lora_requests_info`."""
    text = labels.get("max_lora", "")
    return {"max_loras": int(text)} if text.isascii() and text.isdigit() and 0 < int(text) <= MAX_LORAS else {}


def parse_adapters(body: bytes) -> frozenset[str]:
    """Parse the LoRA adapters of /v1/models, which have a parent; none where the reply is none."""
    try:
        cards = json.loads(body)["data"]
        return frozenset(card["id"] for card in cards if card.get("parent") and isinstance(card["id"], str))
    except (ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def parse_max_model_len(body: bytes) -> int | None:
    """Parse the largest max_model_len of /v1/models; None where no model has one."""
    try:
        cards = json.loads(body)["data"]
        lengths = [card["max_model_len"] for card in cards if card.get("max_model_len") is not None]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return max((length for length in lengths if type(length) is int and length > 0), default=None)
