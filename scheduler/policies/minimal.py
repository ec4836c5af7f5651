"""The shortest step: a baseline of PolyServe §5.1."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def shortest_step(candidates: Candidates) -> Column:
    """Score = predicted duration of a step that decodes all requests there."""
    return candidates["decode_step_s"]
