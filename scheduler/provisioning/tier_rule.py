"""As many instances as the tiers need: more where requests of a tier wait and the best-effort pool is empty."""

from __future__ import annotations

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget


def tiers(_: ScalingObjectives) -> Rule:
    """Return a rule that adds what the tiers lack, and allows what is idle in the pool to leave."""

    def rule(state: PoolState) -> ScalingTarget:
        needs = state.tiers
        if needs is None:
            return ScalingTarget(
                num_wanted=state.num_present, num_enough=state.num_present, why="there are no tiers (--tiers FILE)"
            )
        num_missing = max(0, needs.num_unmet - state.num_starting)
        return ScalingTarget(
            num_wanted=state.num_present + num_missing,
            num_enough=state.num_present - len(needs.idle) + num_missing,
            why=f"tiers lack {needs.num_unmet} instances, {len(needs.idle)} of the pool are idle",
            numbers={"num_unmet": float(needs.num_unmet), "num_idle": float(len(needs.idle))},
        )

    return rule
