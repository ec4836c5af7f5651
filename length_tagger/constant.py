"""`constant`: the same length for all requests, as the last resort."""

from __future__ import annotations

from dataclasses import dataclass

from length_tagger.estimate import Estimate, LengthOutcome, Query

NAME = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTagger:
    """Returns the same estimate for every request, with confidence 0."""

    median_tokens: float
    spread: float

    def estimate(self, query: Query) -> Estimate:  # noqa: ARG002 - the same for every query
        """Return the constant."""
        return Estimate(median_tokens=self.median_tokens, spread=self.spread, confidence=0.0, estimator=NAME)

    def observe(self, outcome: LengthOutcome) -> None:
        """Ignore outcomes."""
