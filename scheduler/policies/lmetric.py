"""LMetric: queued prefill times batch size, with a hotspot detector (LMetric §5, figure 17b)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.hotspots import HotspotDetector
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = P-token x batch size; infinite for instances that the detector excludes as hotspots of the prefix.

    With detector = 0 it is the plain product.
    """
    detector = HotspotDetector(window_s=parameters["window_s"], least_hit_ratio=parameters["least_hit_ratio"])
    is_detecting = parameters["detector"] != 0

    def score(candidates: Candidates) -> Column:
        scores = candidates["p_tokens"] * candidates["batch_size"]
        if is_detecting:
            hotspots = detector.observe(candidates.request, candidates["prefix_hit_tokens"], scores, candidates.now_s)
            if hotspots is not None:
                return np.where(hotspots, np.inf, scores)
        return scores

    return score
