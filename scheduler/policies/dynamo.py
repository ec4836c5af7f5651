"""NVIDIA Dynamo's KV router: queued prefill and held tokens, both normalised (LMetric §6, baselines)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score, normalised


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = λ x P-token / highest P-token + (1 - λ) x total tokens / highest total tokens."""
    weight = parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        prefill, total = normalised(candidates["p_tokens"]), normalised(candidates["total_tokens"])
        return weight * prefill + (1.0 - weight) * total

    return score
