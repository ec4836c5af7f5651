"""Lowest mean latency of all requests: the new one's, and what it adds to everybody else's (Block §4.2's variant)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.indicators import Column


def lowest_mean(candidates: Candidates) -> Column:
    """Score = predicted e2e + summed delay of the others: by as much as the sum of all latencies grows."""
    return candidates["predicted_e2e_s"] + candidates["delay_sum_s"]
