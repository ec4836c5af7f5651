"""Llumnix- as Block prints it: (used memory + memory to prefill what waits) / batch size (Block §5).

It is the memory of the average request, so that instances full of short requests look good, and requests herd there.
"""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column


def lightest(candidates: Candidates) -> Column:
    """Score = (used blocks + blocks that the waiting need) / max(running, 1)."""
    taken = candidates["num_used_blocks"] + candidates["num_needed_blocks"]
    return taken / np.maximum(candidates["num_running"], 1.0)
