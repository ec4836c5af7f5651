"""`client`: what the request itself says about its answer."""

from __future__ import annotations

from dataclasses import dataclass

from length_tagger.estimate import Estimate, LengthOutcome, Query, chance_within_factor_two

NAME = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTagger:
    """Knows the length where the client has fixed it, and takes the client's word where it has one.

    With `ignore_eos` an answer ends at `max_tokens` and nowhere else; the same goes where `min_tokens` leaves no room
    below. An expected length (`nvext.agent_hints.osl`) is taken to be right within `hint_spread`.
    """

    hint_spread: float

    def estimate(self, query: Query) -> Estimate | None:
        """Read it off the request."""
        if query.max_tokens is not None and (query.ignore_eos or query.max_tokens in (1, query.min_tokens)):
            return Estimate(median_tokens=query.max_tokens, spread=0.0, confidence=1.0, estimator=NAME)
        if query.expected_tokens is not None:
            return Estimate(
                median_tokens=query.expected_tokens,
                spread=self.hint_spread,
                confidence=chance_within_factor_two(self.hint_spread),
                estimator=NAME,
            )
        return None

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn nothing: the next client may have another mind."""
