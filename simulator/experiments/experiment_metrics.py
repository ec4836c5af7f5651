"""The kinds of experiments, and the metrics of each kind with the functions that read them from a summary."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

CAPACITY, SWEEP, FORECASTS, PROVISIONING, HYBRID, URGENCY, GOODPUT, COST = KINDS = (
    "capacity", "sweep", "forecasts", "provisioning", "hybrid", "urgency", "goodput", "cost",
)  # fmt: skip
LATENCY_PLOTS = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")


def _of_priority(summary: dict[str, Any], priority: int, metric: str) -> float | None:
    """Read a metric of the requests with a priority; None where no such request has a target."""
    part: dict[str, float] = summary.get("by_priority", {}).get(str(priority), {})
    return part.get(metric)


def _of_quarter(summary: dict[str, Any], place: int) -> float | None:
    """Read the SLO attainment of a quarter of the requests with targets, by the length of their prompts."""
    quarters: list[dict[str, float]] = summary.get("by_prompt_quarter", [])
    return quarters[place]["slo_attained"] if quarters else None


# The metrics that reports and charts can show, as functions of a summary.
METRICS: Mapping[str, Callable[[dict[str, Any]], float | None]] = {
    "ttft_mean_s": lambda s: s["ttft_s"]["mean"],
    "ttft_p99_s": lambda s: s["ttft_s"]["p99"],
    "tpot_mean_s": lambda s: s["tpot_s"]["mean"],
    "tpot_p99_s": lambda s: s["tpot_s"]["p99"],
    "e2e_mean_s": lambda s: s["e2e_s"]["mean"],
    "e2e_p99_s": lambda s: s["e2e_s"]["p99"],
    "requests_per_s": lambda s: s["requests_per_s"],
    "preemptions": lambda s: s["num_preemptions"],
    "free_blocks_mean": lambda s: s["free_blocks"]["mean"] if "free_blocks" in s else None,
    "free_blocks_variance": lambda s: s["free_blocks"]["variance"] if "free_blocks" in s else None,
    "hit_ratio": lambda s: s["hit_ratio"],
    "prefill_imbalance": lambda s: s["prefill_imbalance"],
    "e2e_error_mean": lambda s: s["e2e_error"]["mean"] if "e2e_error" in s else None,
    "e2e_error_p50": lambda s: s["e2e_error"]["p50"] if "e2e_error" in s else None,
    "tdg_ratio": lambda s: s.get("tdg_ratio"),
    "slo_attained": lambda s: s.get("slo_attained"),
    "deadline_attained": lambda s: s.get("deadline_attained"),
    "worst_ttft_over_target": lambda s: s.get("worst_ttft_over_target"),
    **{
        f"{name}_priority_{priority}": functools.partial(_of_priority, priority=priority, metric=name)
        for name in ("tdg_ratio", "slo_attained", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
        for priority in (0, 1)
    },
    "slo_attained_shortest_quarter": lambda s: _of_quarter(s, 0),
    "slo_attained_longest_quarter": lambda s: _of_quarter(s, -1),
}


FORECAST_METRICS = {
    name: operator.itemgetter(name)
    for name in ("e2e_error_mean", "e2e_error_p50", "best_share", "first_three_share", "rank_mean")
}

# Of one engine that serves real-time and best-effort requests.
HYBRID_METRICS = {
    name: operator.itemgetter(name)
    for name in (
        "rt_normalized_latency_s", "be_throughput", "rt_ttft_attained", "rt_tpot_attained", "rt_ttft_mean_s",
        "rt_ttft_p99_s", "rt_tpot_mean_s", "rt_throughput", "preemptions",
    )
}  # fmt: skip
# Of one engine whose rule distinguishes urgent requests from the others.
URGENCY_METRICS = {name: operator.itemgetter(name) for name in ("num_urgent", "num_normal", "urgent_share")}
OWN_METRICS = {FORECASTS: FORECAST_METRICS, HYBRID: HYBRID_METRICS, URGENCY: URGENCY_METRICS}
HYBRID_PLOTS = ("rt_normalized_latency_s", "be_throughput", "rt_ttft_attained", "rt_tpot_attained")
OWN_PLOTS = {FORECASTS: tuple(FORECAST_METRICS), HYBRID: HYBRID_PLOTS, URGENCY: tuple(URGENCY_METRICS)}


def metrics_of(kind: str) -> Mapping[str, Callable[[dict[str, Any]], float | None]]:
    """Return the metrics of a kind of experiment, by name, with the functions that read them from a summary."""
    return OWN_METRICS.get(kind, METRICS)
