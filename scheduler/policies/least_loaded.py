"""Least loaded: the fewest requests, running or not."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def fewest(candidates: Candidates) -> Column:
    """Score = batch size: running, waiting and reserved requests."""
    return candidates["batch_size"]
