"""PolyServe (§4.2 to §4.6): tiers by TPOT target, and in each the busiest instance that still keeps all deadlines.

Held = while no instance that is empty, or of the same or a stricter tier, keeps its deadlines and those of the request
Score = tier (the request's own, a stricter one, a pending one, none), then - load

An instance is of the tier that the list of instances gives. Without one it is of the tier of its strictest request,
and an empty one of none: it joins the tier of its next request, as those of PolyServe's pool do at once (§4.3), and
leaves it with the last one. A pending instance (§4.4) takes requests of its tier only, after all others of it.

In a tier the highest load goes first (the load gradient); where the own tier is full, a request goes to the next
stricter one (lazy promotion). Deadlines are those of a simulation of the engine, with the wait for the running step,
the chunks of the prefill and the growing contexts; the paper looks a step up in a table of batch size and context.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.policies import deadlines
from scheduler.policies.entry import Score
from scheduler.tier_formulas import SAME_TIER

ADMITS = f"{deadlines.KEEPS} and {deadlines.FITS_TIER}"
STRICTER, PENDING, EMPTY, LOOSER = 1e3, 1e5, 1e6, 1e9


def make(parameters: Mapping[str, float], _: np.random.Generator) -> Score:
    """Score = tier, then - (duration of a decode step + seconds of queued prefill); + without the gradient."""
    sign = -1.0 if parameters["gradient"] > 0 else 1.0
    promotes = parameters["promotion"] > 0

    def score(candidates: Candidates) -> Column:
        ratio, closed = candidates["tier_ratio"], candidates["tier_closed"]
        stricter = STRICTER * (1.0 - np.log(np.minimum(ratio, 1.0))) if promotes else LOOSER
        tier = np.where(ratio < 1.0 / SAME_TIER, stricter, np.where(ratio > SAME_TIER, LOOSER, 0.0))
        tier = np.where(ratio == np.inf, EMPTY, np.where(np.isnan(ratio), np.nan, tier))
        if closed.any():
            tier = np.where(closed > 0, np.where(tier == 0.0, PENDING, LOOSER), tier)
        return tier + sign * (candidates["decode_step_s"] + candidates["queued_prefill_s"])

    return score
