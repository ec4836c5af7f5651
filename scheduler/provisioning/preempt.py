"""One more instance when the forecast of an arriving request reaches the threshold (Block §6.5)."""

from __future__ import annotations

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def preempt(objectives: ScalingObjectives) -> Rule:
    """Return a rule that acts on forecasts."""

    def rule(state: PoolState) -> ScalingTarget:
        is_over = state.worst_forecast_s >= objectives.threshold_s
        is_calm = state.worst_recent_s < objectives.threshold_s * objectives.low_share
        return ScalingTarget(
            num_wanted=state.num_present + is_over,
            num_enough=state.num_present - is_calm,
            why=f"the worst forecast, {state.worst_forecast_s:.1f} s, {'reaches' if is_over else 'is below'} the "
            f"threshold of {objectives.threshold_s:g} s",
            numbers={"worst_forecast_s": state.worst_forecast_s, "threshold_s": objectives.threshold_s},
        )

    return rule
