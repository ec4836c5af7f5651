"""`constant`: one length for all, where nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass

from length_tagger.estimate import Estimate, LengthOutcome, Query

NAME = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTagger:
    """Says the same about every request, with no confidence in it."""

    median_tokens: float
    spread: float

    def estimate(self, query: Query) -> Estimate:  # noqa: ARG002 - whatever is asked
        """Give the constant."""
        return Estimate(median_tokens=self.median_tokens, spread=self.spread, confidence=0.0, estimator=NAME)

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn nothing: a constant stays."""
