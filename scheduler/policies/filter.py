"""AIBrix's prefix-cache rule, a filter: balance first, then cache hits (LMetric §4.5, figure 13)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = batch size if the range of batch sizes exceeds a threshold, else 1 - hit ratio."""
    max_range = parameters["range"]

    def score(candidates: Candidates) -> Column:
        sizes = candidates["batch_size"]
        spread = np.fmax.reduce(sizes) - np.fmin.reduce(sizes)
        if spread > max_range:
            return sizes
        return 1.0 - candidates["prefix_hit_ratio"] + 0.0 * sizes  # unknown if the batch size is unknown

    return score
