"""What metrics and measured numbers are called and look like in reports."""

from __future__ import annotations

import math

from simulator.experiments.findings import Row

TITLES = {
    "ttft_mean_s": "mean TTFT, s",
    "ttft_p99_s": "P99 TTFT, s",
    "tpot_mean_s": "mean TPOT, s",
    "tpot_p99_s": "P99 TPOT, s",
    "e2e_mean_s": "mean e2e, s",
    "e2e_p99_s": "P99 e2e, s",
    "requests_per_s": "throughput, requests/s",
    "capacity": "capacity, requests/s",
    "free_blocks_mean": "free blocks, mean",
    "free_blocks_variance": "free blocks, variance between instances",
    "hit_ratio": "prompt tokens found cached, share",
    "prefill_imbalance": "prefill time of the busiest instance over the mean, less 1",
    "e2e_error_mean": "error of predicted e2e, mean",
    "e2e_error_p50": "error of predicted e2e, median",
    "best_share": "how often the instance foretold to be best was",
    "first_three_share": "how often it was among the best three",
    "rank_mean": "its mean rank",
}


def title_of(metric: str) -> str:
    """Say in words what a metric is."""
    return TITLES.get(metric, metric.replace("_", " "))


def number_of(row: Row) -> str:
    """Write a number with its interval, where there is one."""
    return f"{row.value:.2f}" + ("" if row.ci95 is None else f" ± {row.ci95:.2f}")


def rounded(value: float, half: float | None = None) -> str:
    """Write a number to as many digits as its interval lets count, or three."""
    size = abs(half or 0.0) / 10 or abs(value) / 100 or 1.0
    decimals = max(0, min(6, -math.floor(math.log10(size) + 1e-9)))
    return f"{value:.{decimals}f}" + ("" if half is None else f" ± {half:.{decimals}f}")
