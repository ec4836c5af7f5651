"""Linear combination of cache hits and load, Bailian's production rule (LMetric §4.2, figure 6b, and §4.4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score, normalised


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = λ x (1 - hit ratio) + (1 - λ) x batch size / highest batch size."""
    weight = parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        missed = 1.0 - candidates["prefix_hit_ratio"]
        return weight * missed + (1.0 - weight) * normalised(candidates["batch_size"])

    return score
