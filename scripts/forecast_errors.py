"""The errors of forecasts that replies carry, against the latencies that their client has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.report import row
from simulator.load_report import RequestResult


def forecast_requests(results: Sequence[RequestResult]) -> list[RequestResult]:
    """Return the requests with a whole response and a forecast."""
    return [one for one in results if one.failure is None and one.predicted_e2e_s is not None]


def forecast_errors(results: Sequence[RequestResult], shares: Sequence[int]) -> list[dict[str, Any]]:
    """Return the errors of the forecasts, and some percentiles of the latencies."""
    good = forecast_requests(results)
    rows = [row("failed_requests", len(results) - len(good), "requests", len(results))]
    for name in ("ttft", "tpot", "e2e"):
        pairs = [pair for one in good if (pair := predicted_and_actual(one, name)) is not None]
        errors = [(predicted - actual) / actual for predicted, actual in pairs]
        rows.append(row(f"{name}_error.median", statistics.median(map(abs, errors)), "ratio", len(errors)))
        rows.append(row(f"{name}_error.p90", float(np.percentile(np.abs(errors), 90)), "ratio", len(errors)))
        rows.append(row(f"{name}_error.bias", statistics.median(errors), "ratio", len(errors)))
        values = [actual for _, actual in pairs]
        rows += [row(f"{name}_s.p{share}", float(np.percentile(values, share)), "s", len(values)) for share in shares]
    return rows


def predicted_and_actual(one: RequestResult, name: str) -> tuple[float, float] | None:
    """Return a request's predicted and measured latency from sending on."""
    if one.predicted_ttft_s is None or one.predicted_e2e_s is None or one.ttft_s is None or one.e2e_s is None:
        return None
    if name != "tpot":
        return getattr(one, f"predicted_{name}_s"), getattr(one, f"{name}_s") - one.sent_s
    if one.tpot_s is None:
        return None
    return (one.predicted_e2e_s - one.predicted_ttft_s) / (one.output_tokens - 1), one.tpot_s
