"""One more as soon as a request that ended took longer than the threshold (the baseline of Block §6.5)."""

from __future__ import annotations

from scheduler.provisioning.limits import Aims
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def relief(aims: Aims) -> Rule:
    """Act on what has happened."""

    def rule(now: PoolState) -> ScalingTarget:
        over = now.worst_outcome_s >= aims.threshold_s
        calm = now.worst_lately_s < aims.threshold_s * aims.low_share
        return ScalingTarget(
            num_wanted=now.num_present + over,
            num_enough=now.num_present - calm,
            why=f"a request that took {now.worst_outcome_s:.1f} s {'crosses' if over else 'stays below'} "
            f"{aims.threshold_s:g} s",
            numbers={"worst_outcome_s": now.worst_outcome_s, "threshold_s": aims.threshold_s},
        )

    return rule
