"""Deadlines by forecast; ours, after PolyServe §4: an instance that keeps its deadlines and those of the request.

Held = while no instance keeps them and has a short queue, of those that are not looser if there are any
Score = tier distance, then load - hits x seconds of prefill that the prefix cache saves (-load: see below)

An instance is of the tier that the list of instances gives, or else as strict as the strictest request that can still
attain its deadlines there. A request goes first to an instance that is as strict as itself, then to an empty one, then
to the nearest stricter one. It goes to a looser one, which it makes strict for all requests there, only where all are
looser. Of equals the least loaded one is chosen. There are no tiers where `tiers_matter` is 0, nor without `affinity`.
Tiers of the list of instances grow and shrink: there the busiest one is chosen, and an empty one after stricter ones.
Where a prefix of the prompt is cached, `hits` times the prefill that this saves is taken from the load. A stricter
instance is as good as one of the own tier if the prefix saves more than its shorter steps cost (`tier_cost_s`).

Best effort goes first to instances that have no deadline to keep, then to the loosest, and so do late requests: to the
busiest of these, so that few instances miss deadlines. They wait while others wait that can be in time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Candidates
from scheduler.indicators import SAME_TIER, Column
from scheduler.policies.entry import Score

EMPTY, STRICTER, EMPTY_OF_POOL, LOOSER = 1.0, 2.0, 9.0, 10.0  # distances; that of the same tier is 0


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = affinity x tier distance +- (duration of a decode step + λ x queued prefill) - hits x cached prefill."""
    affinity, weight, hits = parameters["affinity"], parameters["lambda"], parameters["hits"]

    def score(candidates: Candidates) -> Column:
        apart, saved_s = np.log(candidates["tier_ratio"]), candidates["cached_prefill_s"]
        other = np.where(apart > 0, LOOSER + apart, STRICTER - apart)
        listed = affinity > 0 and (candidates["tier_tpot_s"] < np.inf).any()
        shrinks = listed and candidates.request.tpot_slo_s < np.inf
        other = np.where(apart == np.inf, EMPTY_OF_POOL if shrinks else EMPTY, other)
        distance = np.where(np.abs(apart) <= np.log(SAME_TIER), 0.0, other)
        if hits > 0 and saved_s.any():
            distance = np.where(_saves_more_than_its_tier_costs(candidates, distance), 0.0, distance)
        alike = (candidates["tiers_matter"] == 0) | (affinity <= 0)
        distance = np.where(alike, 0.0, distance) + LOOSER * candidates["tier_closed"]
        load = candidates["decode_step_s"] + weight * candidates["queued_prefill_s"]
        if candidates.request.late:
            return affinity * distance + np.where(alike | (distance > EMPTY), -load, load)
        return affinity * distance + (-load if shrinks else load) - hits * saved_s

    return score


def _saves_more_than_its_tier_costs(candidates: Candidates, distance: Column) -> npt.NDArray[np.bool_]:
    """Return which stricter instances have a prefix that is worth their tier, and more than those of the own tier."""
    saved_s, ratio = candidates["cached_prefill_s"], candidates["tier_ratio"]
    other_s = np.max(saved_s, where=distance <= EMPTY, initial=0.0)
    return (ratio < 1.0 / SAME_TIER) & (saved_s - candidates["tier_cost_s"] > other_s)
