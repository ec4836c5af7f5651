"""Several estimators in a stated order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from length_tagger.estimate import Estimate, Outcome, Query, Tagger


class Chain:
    """Asks its estimators in order and takes the first answer; all of them learn.

    What the client has set bounds any answer: the median of a length that is cut at `max_tokens` is the median of the
    uncut length, cut there.
    """

    def __init__(self, taggers: Sequence[Tagger]) -> None:
        """Keep the order."""
        self._taggers = tuple(taggers)

    def estimate(self, query: Query) -> Estimate | None:
        """Give the first answer there is, within what is possible; None where nobody has one."""
        for tagger in self._taggers:
            estimate = tagger.estimate(query)
            if estimate is not None:
                return bounded(estimate, query)
        return None

    def observe(self, outcome: Outcome) -> None:
        """Tell everybody."""
        for tagger in self._taggers:
            tagger.observe(outcome)


def bounded(estimate: Estimate, query: Query) -> Estimate:
    """Hold a median between what the client asked for at least and at most."""
    median_tokens = max(estimate.median_tokens, query.min_tokens or 0)
    if query.max_tokens is not None:
        median_tokens = min(median_tokens, query.max_tokens)
    return estimate if median_tokens == estimate.median_tokens else replace(estimate, median_tokens=median_tokens)
