"""Join the shortest queue, vLLM's rule for its own replicas: waiting requests count more (LMetric §4.2, figure 6a)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = weight x (waiting + reserved) + running."""
    weight = parameters["waiting_weight"]

    def score(candidates: Candidates) -> Column:
        return weight * candidates["num_queued"] + candidates["num_running"]

    return score
