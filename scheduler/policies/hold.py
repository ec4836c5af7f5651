"""Block with patience: where a request would finish first, of those that could begin it now; ours, after Block §4.2.

Held = while no instance has predicted_queue_s < 0.5 and predicted_preemptions < 1
Score = predicted e2e

Near capacity Block sends requests to wait in engines, which admit them when there is room for a prompt but not for its
answer, and then preempt. Held at the scheduler, first come first served, they go to whoever has room first.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.indicators import Column

ADMITS = "predicted_queue_s < 0.5 and predicted_preemptions < 1"


def lowest_e2e(candidates: Candidates) -> Column:
    """Score = predicted e2e."""
    return candidates["predicted_e2e_s"]
