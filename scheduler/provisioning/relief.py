"""One more instance when the latency of a completed request reaches the threshold (the baseline of Block §6.5)."""

from __future__ import annotations

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def relief(objectives: ScalingObjectives) -> Rule:
    """Return a rule that acts on measured latencies."""

    def rule(state: PoolState) -> ScalingTarget:
        is_over = state.worst_outcome_s >= objectives.threshold_s
        is_calm = state.worst_recent_s < objectives.threshold_s * objectives.low_share
        return ScalingTarget(
            num_wanted=state.num_present + is_over,
            num_enough=state.num_present - is_calm,
            why=f"the worst latency, {state.worst_outcome_s:.1f} s, {'reaches' if is_over else 'is below'} the "
            f"threshold of {objectives.threshold_s:g} s",
            numbers={"worst_outcome_s": state.worst_outcome_s, "threshold_s": objectives.threshold_s},
        )

    return rule
