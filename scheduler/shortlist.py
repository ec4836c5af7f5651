"""Leaving few candidates of many: the lowest k by a score, or k that are drawn."""

from __future__ import annotations

import numpy as np

from scheduler.candidates import Rows
from scheduler.indicators import Column

MOST_BUFFERED = 1024


def lowest(scores: Column, k: int, tie_break: Column | None = None) -> Rows:
    """Find the k lowest scores, in the order of their rows; of equals the lowest tie-break, then the first.

    What is not known comes last. It costs little more for many than for few: nothing is sorted.
    """
    scores = np.fmin(scores, np.inf)
    sorted_to_k = scores.copy()
    sorted_to_k.partition(k - 1)
    threshold = sorted_to_k[k - 1]
    rows: Rows = (scores <= threshold).nonzero()[0]
    if len(rows) == k:
        return rows
    at_threshold = scores[rows] == threshold
    below, equals = rows[~at_threshold], rows[at_threshold]
    missing = k - len(below)
    if tie_break is not None:
        equals = equals[lowest(tie_break[equals], missing)]
    kept = np.concatenate((below, equals[:missing]))
    kept.sort()
    return kept


class Draws:
    """Draws candidates with a seeded generator, which is asked for many numbers at once."""

    def __init__(self, generator: np.random.Generator) -> None:
        """Draw nothing yet."""
        self._generator = generator
        self._numbers: list[float] = []

    def some(self, k: int, of: int) -> Rows:
        """Draw k different rows of so many, each set as likely as any other (Floyd's algorithm), in their order."""
        drawn: set[int] = set()
        for last in range(of - k, of):
            place = int(self._number() * (last + 1))
            drawn.add(last if place in drawn else place)
        return np.array(sorted(drawn), np.intp)

    def _number(self) -> float:
        if not self._numbers:
            self._numbers = self._generator.random(MOST_BUFFERED).tolist()
        return self._numbers.pop()
