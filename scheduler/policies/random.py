"""Random: any instance, without looking (Block §5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score


def make(_: Mapping[str, float], generator: np.random.Generator) -> Score:
    """Score = a fresh random number."""

    def score(candidates: Candidates) -> Column:
        return generator.random(len(candidates))

    return score
