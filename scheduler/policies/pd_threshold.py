"""llm-d's rule: the decode instance by cache hits and load; two legs if enough of the prompt is not cached there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score, normalised


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = λ x (1 - hit ratio) + (1 - λ) x batch size / highest batch size.

    Two legs = tokens not cached >= a threshold.
    """
    weight = parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        missed = 1.0 - candidates["prefix_hit_ratio"]
        return weight * missed + (1.0 - weight) * normalised(candidates["batch_size"])

    return score
