"""The largest added gain (ProServe §2): the tokens by their deadlines of this request, less those that others lose."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def most_added(candidates: Candidates) -> Column:
    """Score = - (gain with the request - gain without it)."""
    return -candidates["gain_added"]
