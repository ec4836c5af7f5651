"""The least loaded instance of each pool: the fewest requests where a response is generated.

The table of policies chooses the prefill instance by the fewest queued prompt tokens.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.indicators import Column


def fewest(candidates: Candidates) -> Column:
    """Score = batch size."""
    return candidates["batch_size"]
