"""Round-robin: each instance in turn (Block §5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(_: Mapping[str, float], __: np.random.Generator) -> Score:
    """Score = the turn in which the instance was chosen last; instances never chosen come first."""
    last_turns = np.zeros(64)  # by the numbers of instances
    turn = 0.0

    def score(candidates: Candidates) -> Column:
        nonlocal last_turns, turn
        numbers = candidates.numbers
        if numbers.max(initial=0) >= len(last_turns):
            last_turns = np.concatenate((last_turns, np.zeros(numbers.max())))
        scores: Column = last_turns[numbers]
        turn += 1.0
        last_turns[numbers[scores.argmin()]] = turn
        return scores

    return score
