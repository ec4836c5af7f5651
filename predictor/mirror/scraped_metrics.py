"""The parts of an engine's /metrics and /v1/models that a mirror reads: a few totals, and engine settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predictor.config import MAX_LORAS, PRODUCER_AND_CONSUMER
from predictor.speculation import EAGLE, MAX_SPECULATIVE_TOKENS, DraftTotals, require_counts

MAX_LINE_CHARS = 4096
LARGEST = 1e15  # value that a metric of an engine can have, times included

_SAMPLE = re.compile(r"^vllm:([a-z_]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]?Inf)(?: \d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

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
NUM_DRAFTS, NUM_DRAFT_TOKENS = "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"
ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
SETTINGS: dict[str, Callable[[str], int | bool]] = {
    "num_gpu_blocks": int,
    "block_size": int,
    "enable_prefix_caching": lambda text: text == "True",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapedMetrics:
    """One scrape of /metrics; a metric that the engine does not export is None.

    An engine that `updates_rarely` sets its gauges not with every step, so that a scrape may repeat the one before.
    """

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
    drafts: DraftTotals | None = None
    settings: Mapping[str, int | bool | str] = field(default_factory=dict)
    updates_rarely: bool = False

    def shows_restart_since(self, before: ScrapedMetrics) -> bool:
        """Return whether the engine restarted in between: its counters are newer, or lower, than before."""
        if self.created_s is not None and before.created_s is not None and self.created_s > before.created_s:
            return True
        for name in ("prompt_tokens", "generation_tokens", "preemptions"):
            count, earlier = getattr(self, name), getattr(before, name)
            if count is not None and earlier is not None and count < earlier:
                return True
        return False

    def repeats(self, before: ScrapedMetrics) -> bool:
        """Return whether these are the values of the scrape before, of an engine that updates its gauges rarely."""
        names = ("running", "waiting", "kv_usage")
        return self.updates_rarely and all(getattr(self, name) == getattr(before, name) for name in names)

    def shows_progress_since(self, before: ScrapedMetrics) -> bool:
        """Return whether the engine computed tokens in between."""
        return (self.prompt_tokens, self.generation_tokens) != (before.prompt_tokens, before.generation_tokens)


def parse_metrics(text: str) -> ScrapedMetrics:  # noqa: C901 - one branch for each kind of line
    """Parse Prometheus' text format; several engines behind one address are added up, invalid lines are skipped."""
    samples: dict[str, list[float]] = {}
    accepted: dict[int, float] = {}
    settings: dict[str, int | bool | str] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:") or len(line) > MAX_LINE_CHARS or (found := _SAMPLE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", value_in(found[3])
        if value is None:
            continue
        if name == "cache_config_info":
            settings.update(_settings(dict(LABEL.findall(labels))))
        elif name == "lora_requests_info":
            settings.update(_adapter_settings(dict(LABEL.findall(labels))))
        elif name == ACCEPTED_BY_POSITION:
            position = dict(LABEL.findall(labels)).get("position", "")
            if position.isdecimal():
                accepted[int(position)] = accepted.get(int(position), 0.0) + value
        elif name not in METRIC_NAMES["fetching"] or dict(LABEL.findall(labels)).get("stage") == "in_progress":
            samples.setdefault(name, []).append(value)
    if METRIC_NAMES["fetching"][0] in samples:
        settings["kv_role"] = PRODUCER_AND_CONSUMER  # only engines that fetch have it
    totals: dict[str, Any] = {}
    for name, spellings in METRIC_NAMES.items():
        values = next((samples[spelling] for spelling in spellings if spelling in samples), None)
        if values is not None:
            totals[name] = total_of(name, values)
    drafts = _draft_totals(totals, samples, accepted)
    if drafts is not None and "kv_role" not in settings:
        # the method is not reported; most of them reserve slots as this one does
        settings |= {"speculative_method": EAGLE, "num_speculative_tokens": len(drafts.accepted)}
    return ScrapedMetrics(**totals, drafts=drafts, settings=settings, updates_rarely=False)


def value_in(text: str) -> float | None:
    """Return the value of a sample; None for text that is no number, or one that no engine counts."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= LARGEST else None  # neither NaN nor infinite


def total_of(name: str, values: Sequence[float]) -> float:
    """Return what the engines behind one address have together."""
    if name == "kv_usage":
        return min(1.0, max(values))
    return max(values) if name == "created_s" else math.fsum(values)


def _draft_totals(
    metrics: Mapping[str, float], samples: Mapping[str, list[float]], accepted: Mapping[int, float]
) -> DraftTotals | None:
    """Return the counters of speculative decoding; None without it, or where positions are missing.

    Every step of a request that decodes gives it one token beside the accepted ones.
    """
    if NUM_DRAFTS not in samples or NUM_DRAFT_TOKENS not in samples or not accepted:
        return None
    if sorted(accepted) != list(range(len(accepted))) or len(accepted) > MAX_SPECULATIVE_TOKENS:
        return None
    num_drafts, generated = round(math.fsum(samples[NUM_DRAFTS])), metrics.get("generation_tokens")
    totals = DraftTotals(
        num_drafts=num_drafts,
        num_draft_tokens=round(math.fsum(samples[NUM_DRAFT_TOKENS])),
        accepted=tuple(round(accepted[position]) for position in sorted(accepted)),
        num_chances=None if generated is None else max(num_drafts, round(generated - math.fsum(accepted.values()))),
    )
    try:
        require_counts(totals.num_drafts, totals.num_draft_tokens, totals.accepted)
    except ValueError:
        return None
    return totals


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


def json_in(body: bytes | None) -> Any:
    """Return the JSON of a reply; None where there is none."""
    try:
        return None if body is None else json.loads(body)
    except (ValueError, RecursionError):
        return None


def parse_adapters(body: bytes) -> frozenset[str]:
    """Parse the LoRA adapters of /v1/models, which have a parent; none where the reply is none."""
    try:
        cards = json_in(body)["data"]
        return frozenset(card["id"] for card in cards if card.get("parent") and isinstance(card["id"], str))
    except (KeyError, TypeError, AttributeError):
        return frozenset()


def parse_max_model_len(body: bytes) -> int | None:
    """Parse the largest max_model_len of /v1/models; None where no model has one."""
    try:
        cards = json_in(body)["data"]
        lengths = [card["max_model_len"] for card in cards if card.get("max_model_len") is not None]
    except (KeyError, TypeError, AttributeError):
        return None
    return max((length for length in lengths if type(length) is int and length > 0), default=None)


def parse_version(body: bytes | None) -> str:
    """Parse the version in a reply of /version; empty where there is none."""
    try:
        version = json_in(body)["version"]
    except (KeyError, TypeError):
        return ""
    return version if isinstance(version, str) else ""
