"""Min QPM, LiteLLM's default: the instance that got the fewest requests within the last minute (Block §5)."""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def fewest(candidates: Candidates) -> Column:
    """Score = requests per minute."""
    return candidates["requests_per_minute"]
