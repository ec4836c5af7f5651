"""Reduces many candidates to few: the lowest k by a score, or k at random."""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Rows
from scheduler.columns import Column

BUFFER_SIZE = 1024  # random numbers that are generated at once


def lowest(scores: Column, k: int, tie_break: Column | None = None) -> Rows:
    """Return the positions of the k lowest scores, in ascending order.

    Of equal scores the lowest tie-break wins, then the first position; unknown scores count as the highest. Nothing is
    sorted, so that many candidates cost little more than few.
    """
    scores = np.fmin(scores, np.inf)
    sorted_to_k = scores.copy()
    sorted_to_k.partition(k - 1)
    threshold = sorted_to_k[k - 1]
    positions: Rows = (scores <= threshold).nonzero()[0]
    if len(positions) == k:
        return positions
    at_threshold = scores[positions] == threshold
    below, equals = positions[~at_threshold], positions[at_threshold]
    missing = k - len(below)
    if tie_break is not None:
        equals = equals[lowest(tie_break[equals], missing)]
    kept = np.concatenate((below, equals[:missing]))
    kept.sort()
    return kept


class RandomSampler:
    """Samples candidates with a seeded generator; its random numbers are generated in batches, which is faster."""

    def __init__(self, generator: np.random.Generator) -> None:
        """Start without buffered numbers."""
        self._generator = generator
        self._numbers: list[float] = []

    def sample(self, k: int, of: int) -> Rows:
        """Return k different positions below `of` in ascending order, all sets equally likely (Floyd's algorithm)."""
        sampled: set[int] = set()
        for last in range(of - k, of):
            position = int(self._number() * (last + 1))
            sampled.add(last if position in sampled else position)
        return np.array(sorted(sampled), np.intp)

    def _number(self) -> float:
        if not self._numbers:
            self._numbers = self._generator.random(BUFFER_SIZE).tolist()
        return self._numbers.pop()
