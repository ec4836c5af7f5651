"""One more instance when a latency reaches the threshold: a forecast one, or a measured one (Block §6.5)."""

from __future__ import annotations

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def preempt(objectives: ScalingObjectives) -> Rule:
    """Return a rule that acts on the forecasts of arriving requests."""
    return _threshold_rule(objectives, "worst_forecast_s", "forecast")


def relief(objectives: ScalingObjectives) -> Rule:
    """Return a rule that acts on the measured latencies of completed requests, the paper's baseline."""
    return _threshold_rule(objectives, "worst_outcome_s", "latency")


def _threshold_rule(objectives: ScalingObjectives, number: str, kind: str) -> Rule:
    """Return a rule that compares one number of the pool's state with the threshold."""

    def rule(state: PoolState) -> ScalingTarget:
        worst_s = getattr(state, number)
        is_over = worst_s >= objectives.threshold_s
        is_calm = state.worst_recent_s < objectives.threshold_s * objectives.low_share
        return ScalingTarget(
            num_wanted=state.num_present + is_over,
            num_enough=state.num_present - is_calm,
            why=f"the worst {kind}, {worst_s:.1f} s, {'reaches' if is_over else 'is below'} the threshold of "
            f"{objectives.threshold_s:g} s",
            numbers={number: worst_s, "threshold_s": objectives.threshold_s},
        )

    return rule
