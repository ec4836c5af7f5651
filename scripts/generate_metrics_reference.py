"""Write docs/reference/metrics.md: every Prometheus metric that the services register, read from their source.

`--check` writes nothing and fails if the page is not what the source says.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICES = ROOT / "services"
PAGE = ROOT / "docs" / "reference" / "metrics.md"

KINDS = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "Histogram": "histogram",
    "HistogramMetricFamily": "histogram",
    "Summary": "summary",
}
PREFIX = "block_"
INSTANCE = "instance"

# Which part a folder of services/ belongs to, in the order of the page.
PARTS = {
    "gateway": "Gateway",
    "endpoint_picker": "Endpoint picker",
    "placement": "Placement, in schedulers, in endpoint pickers, and in gateways that decide in their process",
    "scheduler_server": "Scheduler",
    "predictor_server": "Sidecar",
    "tagger_server": "Length tagger",
    "provisioner_server": "Provisioner",
    "rpc": "Every gRPC server",
    "security": "Every server: TLS, keys, roles, audit log",
    "http": "Every HTTP server: gateways, mirrors' proxies, metrics ports",
    "kv_events": "KV events, in sidecars that mirror an engine and wherever the list of instances names them",
    "emulator": "Emulated engine",
}

HEAD = """\
# Metrics

Every metric that Block exposes to Prometheus. This page is generated from the code by
`scripts/generate_metrics_reference.py`. Which of them to watch is in [Operate](../operate.md#metrics-to-watch).

The gateway and emulated engines serve `/metrics` on their own port, the gRPC servers on `--metrics-port`. Histograms
have `_bucket`, `_sum` and `_count`; summaries have `_sum` and `_count`. The gateway also exposes `process_*`,
the metrics of its own process.
"""
EMULATED = """\
An emulated engine also exposes vLLM's metrics under vLLM's names (`vllm:num_requests_running`,
`vllm:kv_cache_usage_perc`, `vllm:time_to_first_token_seconds` and others), with vLLM's labels and buckets.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric as its registration spells it."""

    part: str
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    text = page(metrics())
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date; run {Path(__file__).relative_to(ROOT)}")


def metrics() -> list[Metric]:
    """Find the registrations of all services, each name once for each part."""
    found: dict[tuple[str, str], Metric] = {}
    for path in sorted(SERVICES.rglob("*.py")):
        part = path.relative_to(SERVICES).parts[0]
        for metric in metrics_in(part, ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault((metric.part, metric.name), metric)
    unknown = sorted({part for part, _ in found} - set(PARTS))
    if unknown:
        raise ValueError(f"PARTS: has no title for services/{unknown[0]}, which registers metrics")
    return list(found.values())


def metrics_in(part: str, tree: ast.Module) -> Iterator[Metric]:
    """Find calls of Counter, Gauge and so on whose name is a literal that begins with block_."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    yield from metrics_by_instance_in(part, tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS):
            continue
        name, meaning = (text_of(argument) for argument in (*node.args, None, None)[:2])
        if name is None or not name.startswith(PREFIX):
            continue
        labels = node.args[2] if len(node.args) > 2 else keyword_of(node, "labels", "labelnames")
        if isinstance(labels, ast.Name):
            labels = constants[labels.id]
        found = () if labels is None else tuple(ast.literal_eval(labels))
        yield metric_of(part, name, KINDS[node.func.id], found, meaning or "")


def metrics_by_instance_in(part: str, tree: ast.Module) -> Iterator[Metric]:
    """Find calls of the methods of `services.metrics_by_instance`: name, meaning, and labels after `instance`."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1):
            continue
        name, meaning, *labels = (text_of(argument) or "" for argument in node.args)
        if node.func.attr in KINDS.values() and name.startswith(PREFIX):
            yield metric_of(part, name, node.func.attr, (INSTANCE, *labels), meaning)


def metric_of(part: str, name: str, kind: str, labels: tuple[str, ...], meaning: str) -> Metric:
    """Describe a registration; Prometheus adds a suffix to the names of counters."""
    is_named = kind != "counter" or name.endswith("_total")
    return Metric(part=part, name=name if is_named else f"{name}_total", kind=kind, labels=labels, meaning=meaning)


def text_of(node: ast.expr | None) -> str | None:
    """Read a literal text."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def keyword_of(call: ast.Call, *names: str) -> ast.expr | None:
    """Find a keyword argument by any of its names."""
    return next((keyword.value for keyword in call.keywords if keyword.arg in names), None)


def page(found: list[Metric]) -> str:
    """Write a section for each part."""
    sections = [HEAD]
    for part, title in PARTS.items():
        rows = [row(metric) for metric in found if metric.part == part]
        if rows:
            notes = [EMULATED] if part == "emulator" else []
            table = "\n".join(("| metric | type | labels | meaning |", "|---|---|---|---|", *rows))
            sections.append("\n".join((f"## {title}\n", *notes, f"{table}\n")))
    return "\n".join(sections)


def row(metric: Metric) -> str:
    """Write a row of a table."""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    meaning = metric.meaning.replace("|", "\\|")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |"


if __name__ == "__main__":
    main()
