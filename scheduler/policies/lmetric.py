"""LMetric: prefill to be done times batch size, with a detector of hotspots (LMetric §5, figure 17b)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.hotspots import Hotspots
from scheduler.indicators import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = P-token x batch size; infinite for those whom the detector holds to be hotspots of the request's prefix.

    With detector = 0 it is the bare product.
    """
    hotspots = Hotspots(window_s=parameters["window_s"], least_hit_ratio=parameters["least_hit_ratio"])
    watching = parameters["detector"] != 0

    def score(candidates: Candidates) -> Column:
        scores = candidates["p_tokens"] * candidates["batch_size"]
        if watching:
            hot = hotspots.seen(candidates.request, candidates["prefix_hit_tokens"], scores, candidates.now_s)
            if hot is not None:
                return np.where(hot, np.inf, scores)
        return scores

    return score
