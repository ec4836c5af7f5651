"""Round-robin: each instance in turn (Block §5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score


def make(_: Mapping[str, float], __: np.random.Generator) -> Score:
    """Score = in which turn the instance was last; one that never had a turn comes first."""
    turns = np.zeros(64)  # by instances' numbers
    clock = 0.0

    def score(candidates: Candidates) -> Column:
        nonlocal turns, clock
        numbers = candidates.numbers
        if numbers.max(initial=0) >= len(turns):
            turns = np.concatenate((turns, np.zeros(numbers.max())))
        scores: Column = turns[numbers]
        clock += 1.0
        turns[numbers[scores.argmin()]] = clock
        return scores

    return score
