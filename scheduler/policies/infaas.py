"""INFaaS++ in the sense in which Llumnix- below is meant: most free memory for each running request (Block §5).

Without Llumnix-'s correction for what waits. The formula that the paper prints is `infaas_paper`.
"""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column


def freest(candidates: Candidates) -> Column:
    """Score = -free blocks / max(running, 1)."""
    return -candidates["num_free_blocks"] / np.maximum(candidates["num_running"], 1.0)
