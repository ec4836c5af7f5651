"""Block: the instance on which the request is predicted to finish first (Block §4.2, §5)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lowest_e2e(candidates: Candidates) -> Column:
    """Score = predicted e2e."""
    return candidates["predicted_e2e_s"]
