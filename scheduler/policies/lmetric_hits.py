"""LMetric's ablation: (1 - hit ratio) instead of P-token, without queued prefill (LMetric §5.1, figure 18)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def product(candidates: Candidates) -> Column:
    """Score = (1 - hit ratio) x batch size."""
    return (1.0 - candidates["prefix_hit_ratio"]) * candidates["batch_size"]
