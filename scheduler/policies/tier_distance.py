"""How far the tier of an instance is from that of a request: 0 for the same one, the most for looser ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.tier_formulas import SAME_TIER

EMPTY, STRICTER, EMPTY_OF_POOL, LOOSER = 1.0, 2.0, 9.0, 10.0


def tier_distance(candidates: Candidates, saved_s: Column | None, empty: float) -> Column:
    """Return the distance of each instance; `empty` is that of instances without requests.

    Seconds of prefill that prefix caches save, where they are given, bring stricter instances nearer.
    """
    apart = np.log(candidates["tier_ratio"])
    distance = np.where(apart > 0, LOOSER + apart, STRICTER - apart)
    distance = np.where(apart == np.inf, empty, distance)
    distance = np.where(np.abs(apart) <= np.log(SAME_TIER), 0.0, distance)
    if saved_s is not None and saved_s.any():
        distance = np.where(_saves_more_than_its_tier_costs(candidates, distance), 0.0, distance)
    return distance


def _saves_more_than_its_tier_costs(candidates: Candidates, distance: Column) -> npt.NDArray[np.bool_]:
    """Return where a prefix on a stricter instance saves more than its tier costs, and than any of the own tier."""
    saved_s, ratio = candidates["cached_prefill_s"], candidates["tier_ratio"]
    other_s = np.max(saved_s, where=distance <= EMPTY, initial=0.0)
    saves_more = (saved_s > other_s) & (ratio < 1.0 / SAME_TIER)
    return saves_more & (saved_s - candidates["tier_cost_s"] > other_s) if saves_more.any() else saves_more
