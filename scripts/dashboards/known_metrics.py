"""The series that a Prometheus with Block's targets has, and which of them an expression names wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from predictor.config import PRODUCER_AND_CONSUMER, EngineConfig
from scripts.generate_metrics_reference import metrics
from services.emulator.kv_transfers import TransferCounts
from services.emulator.metrics import EngineMetrics, Exposition, Gauges

SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
TARGET_LABELS = {"job", "instance"}
PROCESS = ("process_cpu_seconds_total", "process_resident_memory_bytes")
# what Prometheus itself writes
OWN = {"up": TARGET_LABELS, "ALERTS": TARGET_LABELS | {"alertname", "alertstate", "severity"}}

NAME = re.compile(r"(?<![\w:$\"])(?:block_|vllm:|process_)\w+|\b(?:up|ALERTS)\b(?=\s*[{=)\[])")
SELECTOR = re.compile(rf"({NAME.pattern})(?:\{{([^}}]*)\}})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def known_series() -> Mapping[str, set[str]]:
    """Return the labels of each series, by name: Block's, vLLM's as an emulated engine has them, Prometheus'."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OWN.items()}
    for name in PROCESS:
        found[name] = set(TARGET_LABELS)
    for metric in metrics():
        for suffix in SUFFIXES[metric.kind]:
            labels = {*metric.labels, *TARGET_LABELS, *(["le"] if suffix == "_bucket" else [])}
            found.setdefault(f"{metric.name}{suffix}", set()).update(labels)
    for name, labels in emulated_series():
        found.setdefault(name, set()).update(labels, TARGET_LABELS)
    return found


def emulated_series() -> Iterator[tuple[str, set[str]]]:
    """Return the series of an emulated engine with a KV connector, and their labels."""
    config = EngineConfig(kv_role=PRODUCER_AND_CONSUMER)
    stages = [0] * 16
    gauges = Gauges(
        num_running=0, num_waiting=0, kv_cache_usage=0, num_preemptions=0, lag_s=0, num_by_stage=stages, num_held=0
    )
    engine = EngineMetrics(max_model_len=config.max_model_len, speed=1.0)
    text = Exposition(engine, config, "model", TransferCounts(), gauges=lambda: gauges).text().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, set(sample.labels)


def faults_of(expression: str, known: Mapping[str, set[str]]) -> Iterator[str]:
    """Say which series and labels of an expression do not exist."""
    available: set[str] = set()
    for name, matchers in SELECTOR.findall(expression):
        if name not in known:
            yield f"there is no metric {name}"
            continue
        available |= known[name]
        for label in MATCHER.findall(matchers):
            if label not in known[name]:
                yield f"{name} has no label {label}"
    for group in GROUPING.findall(expression):
        for label in filter(None, (part.strip() for part in group.split(","))):
            if label not in available:
                yield f"no metric of {expression!r} has a label {label}"
