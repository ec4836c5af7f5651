"""The latency of the request plus a weighted part of its delay of others; ours, after Block §4.2.

The full weight starves requests and hurts the tail; a small weight improves the mean if lengths are known.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = predicted e2e + λ x summed delay of the others."""
    weight = parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        return candidates["predicted_e2e_s"] + weight * candidates["delay_sum_s"]

    return score
