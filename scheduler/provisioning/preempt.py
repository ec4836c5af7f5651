"""One more as soon as a forecast for an arriving request crosses the threshold (Block §6.5)."""

from __future__ import annotations

from scheduler.provisioning.limits import Aims
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def preempt(aims: Aims) -> Rule:
    """Act on what is foreseen."""

    def rule(now: PoolState) -> ScalingTarget:
        over = now.worst_forecast_s >= aims.threshold_s
        calm = now.worst_lately_s < aims.threshold_s * aims.low_share
        return ScalingTarget(
            num_wanted=now.num_present + over,
            num_enough=now.num_present - calm,
            why=f"a forecast of {now.worst_forecast_s:.1f} s {'crosses' if over else 'stays below'} "
            f"{aims.threshold_s:g} s",
            numbers={"worst_forecast_s": now.worst_forecast_s, "threshold_s": aims.threshold_s},
        )

    return rule
