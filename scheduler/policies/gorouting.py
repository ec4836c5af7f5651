"""GoRouting (ProServe §4.3, algorithm 2): of the instances with about the most added gain, a light or a busy one.

The gain is that of a simulation of the engine's own batching rule. A light instance takes the request at once; where
none is light, the busiest one that still has time to spare takes it, so that others stay free for long prompts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score

OTHER = 1e9  # added to the scores of instances that are not considered


def make(parameters: Mapping[str, float], generator: np.random.Generator) -> Score:
    """Score = seconds of prefill there, or minus that, by how loaded the best instances are; see algorithm 2."""
    alpha, low, high = parameters["alpha"], parameters["mu"], parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        gain, left_s = candidates["gain_added"], candidates["ttft_left_s"]
        queued_s, ttft_s = candidates["queued_prefill_s"], candidates["predicted_ttft_s"]
        most = np.fmax.reduce(gain, initial=-np.inf)
        if not most > 0:
            return generator.random(len(candidates))
        is_best = gain >= alpha * most
        is_light = is_best & (queued_s < low * left_s)
        is_spare = is_best & ~(ttft_s > high * left_s)
        if is_light.any():
            return np.where(is_light, queued_s, OTHER + queued_s)
        if is_spare.any():
            return np.where(is_spare, -queued_s, OTHER + queued_s)
        return np.where(is_best, queued_s, OTHER + queued_s)

    return score
