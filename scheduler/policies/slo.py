"""Deadlines by forecast; ours, after PolyServe §4: an instance that keeps its deadlines and those of the request.

Held = while no instance keeps them and has a short queue, of those that are not looser if there are any
Score = tier distance, then load (late requests: -load)

An instance is of the tier that the list of instances gives, or else as strict as the strictest request that can still
attain its deadlines there. A request goes first to an instance that is as strict as itself, then to an empty one, then
to the nearest stricter one. It goes to a looser one, which it makes strict for all requests there, only where all are
looser. Of equals the least loaded one is chosen. There are no tiers where `tiers_matter` is 0, nor without `affinity`.

Best effort, and a request that is late already, goes where no other request misses a deadline because of it, and all
keep `slack` or `late_slack` seconds for the next request with deadlines: first to instances that have no deadline to
keep, then to the loosest; late ones to the busiest of these, so that few instances miss deadlines. It waits while
others wait that can be in time.

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
WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog}"
PATIENT_WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog} / 3"
BACKLOG_S, SLACK_S, LATE_SLACK_S = 0.3, 0.05, 1.0
# Both are true where a sidecar does not say how much slack there is, or how strict its instance is.
LEAVES_SLACK = "otherwise(least_slack_s, 1e9) >= ({late_slack} if late > 0 else {slack})"
FITS_TIER = "otherwise(tier_fits, 1) > 0"
ELIGIBLE = f"({FITS_TIER} or highest(tier_fits) < 1 or tier_closed < 1 and ({{affinity}} <= 0 or tiers_matter < 1))"
ADMITS = f"{KEEPS} and {ELIGIBLE}"
EMPTY, STRICTER, LOOSER = 1.0, 2.0, 10.0  # distances; that of the same tier is 0


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = affinity x tier distance + duration of a decode step + λ x seconds of queued prefill."""
    affinity, weight = parameters["affinity"], parameters["lambda"]

    def score(candidates: Candidates) -> Column:
        apart = np.log(candidates["tier_ratio"])
        other = np.where(apart > 0, LOOSER + apart, STRICTER - apart)
        distance = np.where(np.abs(apart) <= np.log(SAME_TIER), 0.0, np.where(apart == np.inf, EMPTY, other))
        alike = (candidates["tiers_matter"] == 0) | (affinity <= 0)
        distance = np.where(alike, 0.0, distance) + LOOSER * candidates["tier_closed"]
        load = candidates["decode_step_s"] + weight * candidates["queued_prefill_s"]
        if candidates.request.late:
            load = np.where(alike | (distance > EMPTY), -load, load)  # so that few instances give up deadlines
        return affinity * distance + load

    return score
