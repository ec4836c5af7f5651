"""What an engine's /metrics and /v1/models tell: its settings, and a few totals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_LINE = 4096

_SAMPLE = re.compile(r"^vllm:([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]?Inf)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# by our names; of several spellings the first that is there counts
NAMES = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
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
class EngineTotals:
    """One reading of /metrics; None for what the engine does not tell."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    created_s: float | None = None
    settings: Mapping[str, int | bool] = field(default_factory=dict)

    def began_anew(self, before: EngineTotals) -> bool:
        """Tell whether this is another engine than the one before: what only counts up has gone back."""
        if self.created_s is not None and before.created_s is not None and self.created_s > before.created_s:
            return True
        for name in ("prompt_tokens", "generation_tokens", "preemptions"):
            mine, earlier = getattr(self, name), getattr(before, name)
            if mine is not None and earlier is not None and mine < earlier:
                return True
        return False

    def shows_progress(self, before: EngineTotals) -> bool:
        """Tell whether the engine has computed anything in between."""
        return (self.prompt_tokens, self.generation_tokens) != (before.prompt_tokens, before.generation_tokens)


def totals_from(text: str) -> EngineTotals:
    """Read Prometheus' text format, as far as it is of use here; several engines behind one address are summed up."""
    samples: dict[str, list[float]] = {}
    settings: dict[str, int | bool] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:") or len(line) > MOST_LINE or (found := _SAMPLE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        if name == "cache_config_info":
            settings = _settings(dict(_LABEL.findall(labels)))
        elif math.isfinite(value):
            samples.setdefault(name, []).append(value)
    told: dict[str, float] = {}
    for ours, theirs in NAMES.items():
        values = next((samples[name] for name in theirs if name in samples), None)
        if values is not None:
            told[ours] = max(values) if ours in ("kv_usage", "created_s") else math.fsum(values)
    return EngineTotals(**told, settings=settings)


def _settings(labels: Mapping[str, str]) -> dict[str, int | bool]:
    settings: dict[str, int | bool] = {}
    for name, read in SETTINGS.items():
        try:
            if name in labels:
                settings[name] = read(labels[name])
        except ValueError:  # None, where the engine does not know yet
            continue
    return settings


def model_length_from(body: bytes) -> int | None:
    """Read the longest that a request may be from /v1/models, where it is told."""
    try:
        cards = json.loads(body)["data"]
        lengths = [card["max_model_len"] for card in cards if card.get("max_model_len") is not None]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return max((length for length in lengths if type(length) is int and length > 0), default=None)
