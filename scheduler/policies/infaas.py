"""INFaaS++: the most free memory per running request (Block §5).

It is `llumnix` without the memory that waiting requests need. The formula that the paper prints is `infaas_paper`.
"""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column


def freest(candidates: Candidates) -> Column:
    """Score = -free blocks / max(running, 1)."""
    return -candidates["num_free_blocks"] / np.maximum(candidates["num_running"], 1.0)
