"""Deadlines by forecast; ours: the instance keeps all deadlines that it keeps without the request, and the request's.

Held = while no instance has predicted_attained > 0.5, others_missed < 1 and no predicted preemption
Score = tier distance, then predicted load

An instance has no fixed tier: it is as strict as its strictest request. A request goes first to an instance that is as
strict as itself, then to an empty one, then to others by their distance, so that strict requests do not shorten the
steps of instances full of loose ones. Of equally strict instances the least loaded one is chosen. One that is late
already, and best effort, goes where no deadline of others is missed because of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score

HARMLESS = "others_missed < 1 and predicted_preemptions + others_preempted < 1"
ADMITS = f"predicted_attained > 0.5 and {HARMLESS}"
NEEDS = ("decode_step_s", "queued_prefill_s", "least_tpot_slo_s", "tpot_slo_s", "batch_size")
SAME_TIER = 1.05  # targets within this ratio are the same tier
EMPTY, OTHER = 1.0, 2.0  # distances


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = affinity x tier distance + duration of a decode step + λ x seconds of queued prefill."""
    affinity, weight = parameters["affinity"], parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        load_s = candidates["decode_step_s"] + weight * candidates["queued_prefill_s"]
        return affinity * tier_distance(candidates) + load_s

    return score


def tier_distance(candidates: Candidates) -> Column:
    """Return 0 for instances as strict as the request, 1 for empty ones, more the more they differ for others."""
    strictest_s, own_s = candidates["least_tpot_slo_s"], candidates["tpot_slo_s"]
    is_empty = candidates["batch_size"] == 0
    # without a target a request, or an instance, is as loose as can be
    apart = np.abs(np.log(np.minimum(strictest_s, LOOSEST_S)) - np.log(np.minimum(own_s, LOOSEST_S)))
    distance = np.where(apart <= np.log(SAME_TIER), 0.0, OTHER + apart)
    return np.where(is_empty, EMPTY, distance)


LOOSEST_S = 10.0
