"""Power of two choices: the less loaded of two random instances (Richa et al. 2000, cited in Block §3).

The table of policies sets the sample of two; the parameter `sample` changes it.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column


def fewer(candidates: Candidates) -> Column:
    """Score = batch size."""
    return candidates["batch_size"]
