"""Deadlines by forecast; ours, after PolyServe §4: an instance that keeps its deadlines and those of the request.

Held = while no instance keeps them and has a short queue, of those that are not looser if there are any
Score = tier distance, then load - hits x seconds of prefill that the prefix cache saves (-load: see below)

An instance has the tier that the list of instances gives. Otherwise it is as strict as the strictest request that can
still attain its deadlines there. A request goes first to an instance that is as strict as itself, then to an empty one,
then to the nearest stricter one. It goes to a looser one only where all are looser, because it makes that instance
strict for all requests there. Of equal instances the least loaded one is chosen. There are no tiers where
`tiers_matter` is 0, nor without `affinity`. Tiers of the list of instances grow and shrink: there the busiest instance
is chosen, and an empty one comes after stricter ones.

Where a prefix of the prompt is cached, `hits` times the prefill that this saves is subtracted from the load. A stricter
instance is as good as one of the own tier if the prefix saves more than its shorter steps cost (`tier_cost_s`).

Best effort and late requests go first to instances that have no deadline to keep, then to the loosest ones. Of equally
loose ones late requests go to the busiest, so that few instances miss deadlines. They wait while others wait that can
be in time. Under overload, requests that take at least `long` times the mean, in light overload twice as long, drop
their deadlines, so that few requests are late (`scheduler/admission/late_work.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies.entry import Score
from scheduler.policies.tier_distance import EMPTY, EMPTY_OF_POOL, LOOSER, tier_distance


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = affinity x tier distance +- (duration of a decode step + λ x queued prefill) - hits x cached prefill."""
    affinity, weight, hits = parameters["affinity"], parameters["lambda"], parameters["hits"]

    def score(candidates: Candidates) -> Column:
        load = candidates["decode_step_s"] + weight * candidates["queued_prefill_s"]
        saved_s, shrinks = candidates["cached_prefill_s"], False
        distance = LOOSER * candidates["tier_closed"]
        has_tiers = affinity > 0 and bool(candidates["tiers_matter"].any())
        if has_tiers:
            shrinks = candidates.tpot_slo_s < np.inf and bool((candidates["tier_tpot_s"] < np.inf).any())
            distance += tier_distance(candidates, saved_s if hits > 0 else None, EMPTY_OF_POOL if shrinks else EMPTY)
        if candidates.request.late:
            return affinity * distance + (np.where(distance > EMPTY, -load, load) if has_tiers else -load)
        return affinity * distance + (-load if shrinks else load) - hits * saved_s

    return score
