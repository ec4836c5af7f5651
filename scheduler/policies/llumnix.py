"""Llumnix-, the dispatcher of Llumnix, as Block's published code runs it (Block §5): the strong baseline.

The free memory that is left after the waiting requests are admitted, per running request. If it is negative the score
is positive, so that an instance that is short of blocks comes after all others. The formula that the paper prints is
`llumnix_paper`.
"""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column


def freest(candidates: Candidates) -> Column:
    """Score = -(free blocks - blocks that waiting requests need) / max(running, 1)."""
    short = candidates["num_needed_blocks"] - candidates["num_free_blocks"]
    return short / np.maximum(candidates["num_running"], 1.0)
