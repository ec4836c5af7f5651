"""PolyServe (§4.2 to §4.6): tiers by TPOT target, and in each the busiest instance that still keeps all deadlines.

Held = while no instance that is empty, or of the same or a stricter tier, has predicted_attained > 0.5, others_missed < 1
and no predicted preemption

An instance is of the tier of its strictest request, and an empty one of none: it joins the tier of the next request, as
the instances of PolyServe's best-effort pool do at once (§4.3), and leaves it with the last one. A request goes to its
own tier, highest load first (the load gradient); where that is full, to the next stricter one (lazy promotion, §4.4);
then to an empty one. Deadlines are those of a simulation of the engine, which has the wait for the running step, the
chunks of the prefill and the growing contexts in it; the paper looks a step up in a table of batch size and context.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policies.entry import Score
from scheduler.policies.slo import ADMITS as KEEPS_DEADLINES
from scheduler.policies.slo import LOOSEST_S, SAME_TIER

ADMITS = f"{KEEPS_DEADLINES} and (least_tpot_slo_s <= {SAME_TIER} * tpot_slo_s or batch_size < 1)"
OWN, STRICTER, EMPTY, LOOSER = 0.0, 1e3, 1e6, 1e9


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = tier, then -load (with the gradient) or load."""
    sign = -1.0 if parameters["gradient"] > 0 else 1.0
    promotes = parameters["promotion"] > 0

    def score(candidates: Candidates) -> Column:
        load_s = candidates["decode_step_s"] + candidates["queued_prefill_s"]
        return tier_of(candidates, promotes=promotes) + sign * load_s

    return score


def tier_of(candidates: Candidates, *, promotes: bool) -> Column:
    """Return the place of each instance in the order of tiers that may take the request."""
    ratio = np.minimum(candidates["tpot_slo_s"], LOOSEST_S) / np.minimum(candidates["least_tpot_slo_s"], LOOSEST_S)
    stricter = STRICTER * (1.0 + np.log(np.maximum(ratio, 1.0))) if promotes else LOOSER
    place = np.where(ratio > SAME_TIER, stricter, np.where(ratio < 1.0 / SAME_TIER, LOOSER, OWN))
    return np.where(candidates["batch_size"] == 0, EMPTY, place)
