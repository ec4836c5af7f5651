"""`client`: the response length that the request itself states."""

from __future__ import annotations

from dataclasses import dataclass

from length_tagger.estimate import Estimate, LengthOutcome, Query, chance_within_factor_two

NAME = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTagger:
    """Returns the length that the client has fixed, or else the client's hint.

    With `ignore_eos` a response ends exactly at `max_tokens`, and so it does if `min_tokens` is as large. A hint
    (`nvext.agent_hints.osl`) is assumed to have an error of `hint_spread`.
    """

    hint_spread: float

    def estimate(self, query: Query) -> Estimate | None:
        """Return the length that the request states, if any."""
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
        """Ignore outcomes: every client states its own length."""
