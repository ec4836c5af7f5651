"""Power of two choices: the less loaded of two that are drawn at random (Richa et al. 2000, cited in Block §3).

The table of policies says that two are drawn; `sample` changes how many.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.indicators import Column


def fewer(drawn: Candidates) -> Column:
    """Score = batch size."""
    return drawn["batch_size"]
