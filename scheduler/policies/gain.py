"""The largest added gain (ProServe §2): what this request gains by tokens in time, less what others lose."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def most_added(candidates: Candidates) -> Column:
    """Score = - (gain with the request - gain without it)."""
    return -candidates["gain_added"]
