"""Deadlines by forecast; ours, after PolyServe §4: an instance that keeps its deadlines and those of the request.

Held = while no instance keeps them and has a short queue, or those that do are too busy to become stricter
Score = tier distance, then load

An instance is of the tier that the list of instances gives, or else as strict as the strictest request that can still
attain its deadlines there. A request goes first to an instance that is as strict as itself, then to an empty one, then
to the nearest stricter one. It goes to a looser one, which it makes strict for all requests there, only where decodes
leave time for prefill in steps of the new length, or where all are looser. Of equals the least loaded one is
chosen. A request that is late already, and best effort, goes where no other request misses a deadline because of it:
first to instances that have no deadline to keep, then to the loosest. It waits while others wait that can be in time.

A request that would wait in an engine for longer than `backlog` seconds waits at the scheduler instead: there it can
still go to another instance, tenants get their turns, and a request that will be late leaves in time. Best effort
waits for a third of that, so that it fills only what real-time requests leave.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import SAME_TIER, Column
from scheduler.policies.entry import Score

HARMLESS = "others_missed < 1 and predicted_preemptions + others_preempted < 1"
KEEPS = f"predicted_attained > 0.5 and {HARMLESS}"
BACKLOG_S = 0.3
WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog}"
PATIENT_WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog} / 3"
FITS_TIER = "tier_fits > 0"
DECODE_SHARE = 0.65  # of a step of the request's TPOT, which decodes may take in an instance that becomes stricter
MAY_BECOME_STRICTER = f"tier_closed < 1 and decode_step_s <= {DECODE_SHARE} * tpot_slo_s"
ELIGIBLE = f"({FITS_TIER} or {MAY_BECOME_STRICTER} or highest(tier_fits) < 1)"
ADMITS = f"{KEEPS} and {ELIGIBLE}"
EMPTY, STRICTER, LOOSER = 1.0, 2.0, 10.0  # distances; that of the same tier is 0


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = affinity x tier distance + duration of a decode step + λ x seconds of queued prefill."""
    affinity, weight = parameters["affinity"], parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        apart = np.log(candidates["tier_ratio"])
        other = np.where(apart > 0, LOOSER + apart, STRICTER - apart)
        distance = np.where(np.abs(apart) <= np.log(SAME_TIER), 0.0, np.where(apart == np.inf, EMPTY, other))
        distance = distance + LOOSER * candidates["tier_closed"]
        return affinity * distance + candidates["decode_step_s"] + weight * candidates["queued_prefill_s"]

    return score
