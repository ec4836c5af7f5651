"""Filter-based combination, AIBrix's prefix-cache rule: balance first, then cache hits (LMetric §4.5, figure 13)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = batch size where batch sizes range over more than a threshold, else 1 - hit ratio."""
    widest = parameters["range"]

    def score(candidates: Candidates) -> Column:
        sizes = candidates["batch_size"]
        spread = np.fmax.reduce(sizes) - np.fmin.reduce(sizes)
        if spread > widest:
            return sizes
        return 1.0 - candidates["prefix_hit_ratio"] + 0.0 * sizes  # whose size is not known stays unknown

    return score
