"""INFaaS++ as Block prints it: used memory / batch size (Block §5)."""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column


def lightest(candidates: Candidates) -> Column:
    """Score = used blocks / max(running, 1): the memory of the average request, which does not measure load."""
    return candidates["num_used_blocks"] / np.maximum(candidates["num_running"], 1.0)
