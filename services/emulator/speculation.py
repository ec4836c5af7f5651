"""Speculative decoding of an emulated engine: which draft tokens are proposed and accepted, and their counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from predictor.config import EngineConfig
from predictor.state import EXPECTED, State


@dataclass(slots=True, kw_only=True)
class DraftCounts:
    """Counts of draft tokens since the engine's start; `accepted` counts by position in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_chances: int = 0
    accepted: list[int] = field(default_factory=list)


class DraftDraws:
    """Draws for each step how many draft tokens are accepted and proposed, with the configured probabilities."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        """Start with a seed; all draws follow from it and from the steps."""
        self._most = config.num_speculative_tokens
        self._acceptance = config.speculative_acceptance
        self._share = config.proposal_share
        self._random = np.random.default_rng(seed)
        self.counts = DraftCounts(accepted=[0] * self._most)

    def draw(self, state: State, index: int) -> None:
        """Settle a launched step, in the row `index` of the state's batch."""
        batch = state.batch.view(np.ndarray)[index, : int(state.steps[index].num_scheduled)]
        num, drafts = len(batch), batch["drafts"]
        tries = self._random.random((num, self._most)) < self._acceptance
        accepted = np.minimum(np.cumprod(tries, axis=1).sum(axis=1), drafts)
        is_open = batch["accepted"] == EXPECTED  # the others are filled up, and none of their tokens is accepted
        batch["accepted"] = np.where(is_open, accepted, batch["accepted"])
        batch["proposed"] = np.where(self._random.random(num) < self._share, self._most, 0)
        counts, has_draft = self.counts, drafts > 0
        counts.num_drafts += int(np.count_nonzero(has_draft))
        counts.num_draft_tokens += int(drafts.sum())
        counts.num_chances += int(np.count_nonzero((batch["sampled"] != 0) & (batch["tokens"] == 1 + drafts)))
        reached = batch["accepted"][has_draft]
        for position in range(self._most):
            counts.accepted[position] += int(np.count_nonzero(reached > position))
