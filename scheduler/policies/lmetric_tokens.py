"""LMetric's ablation: total tokens instead of batch size (LMetric §5.1, figure 19)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def product(candidates: Candidates) -> Column:
    """Score = P-token x total tokens."""
    return candidates["p_tokens"] * candidates["total_tokens"]
