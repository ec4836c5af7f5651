"""Round-robin: each instance in turn (Block §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.instances import InstanceView


def in_turn() -> Callable[[Sequence[InstanceView]], list[float]]:
    """Score = how long ago the instance last had its turn, in turns; those that never had one come first."""
    turns: dict[str, int] = {}
    clock = 0

    def policy(views: Sequence[InstanceView]) -> list[float]:
        nonlocal clock
        clock += 1
        scores = [float(turns.get(view.instance_id, 0)) for view in views]
        chosen = min(range(len(views)), key=lambda place: (scores[place], views[place].instance_id))
        turns[views[chosen].instance_id] = clock
        for gone in turns.keys() - {view.instance_id for view in views} if len(turns) > 4 * len(views) else ():
            del turns[gone]
        return scores

    return policy
