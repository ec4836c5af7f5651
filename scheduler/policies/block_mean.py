"""Lowest mean latency of all requests: the new one's, plus its delay of all others (a variant in Block §4.2)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lowest_mean(candidates: Candidates) -> Column:
    """Score = predicted e2e + summed delay of the others: the growth of the sum of all latencies."""
    return candidates["predicted_e2e_s"] + candidates["delay_sum_s"]
