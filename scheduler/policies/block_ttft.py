"""Lowest predicted TTFT: llm-d's simulation-based rule (LMetric §4.6, figure 14)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lowest_ttft(candidates: Candidates) -> Column:
    """Score = predicted TTFT."""
    return candidates["predicted_ttft_s"]
