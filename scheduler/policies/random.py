"""Random: any instance, without reading its state (Block §5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score


def make(_: Mapping[str, float], generator: np.random.Generator) -> Score:
    """Score = a new random number per request and instance."""

    def score(candidates: Candidates) -> Column:
        return generator.random(len(candidates))

    return score
