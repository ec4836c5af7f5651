"""Block with an admission queue: requests wait until an instance can start them; ours, after Block §4.2.

Held = while no instance has predicted_queue_s < 0.5 and predicted_preemptions < 1
Score = predicted e2e

Near capacity Block lets requests wait in engines, which admit a request when there is memory for its prompt but not for
its response, and then preempt. Requests that wait at the scheduler go to the first instance with enough memory.
"""

from __future__ import annotations

from scheduler.candidates import Candidates
from scheduler.columns import Column

ADMITS = "predicted_queue_s < 0.5 and predicted_preemptions < 1"


def lowest_e2e(candidates: Candidates) -> Column:
    """Score = predicted e2e."""
    return candidates["predicted_e2e_s"]
