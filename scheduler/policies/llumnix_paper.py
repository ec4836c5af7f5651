"""Llumnix- as Block prints it: (used memory + memory that waiting prompts need) / batch size (Block §5).

It is the memory of the average request, so that instances with many short requests score low and attract more.
"""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lightest(candidates: Candidates) -> Column:
    """Score = (used blocks + blocks that waiting requests need) / max(running, 1)."""
    taken = candidates["num_used_blocks"] + candidates["num_needed_blocks"]
    return taken / np.maximum(candidates["num_running"], 1.0)
