"""One decision: who was looked at, how they scored, who is first, and who is next if that one fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.instances import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The instances in the order of preference, with their scores, and why others were left out."""

    ranking: tuple[str, ...]
    scores: Mapping[str, float]
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def instance_id(self) -> str:
        """The chosen instance."""
        return self.ranking[0]


def decide(
    views: Sequence[InstanceView],
    policy: Callable[[Sequence[InstanceView]], Sequence[float]],
    skipped: Mapping[str, str] | None = None,
) -> Decision:
    """Rank the instances: by score, equals by id; one whose score is no number comes last, never first by accident."""
    if not views:
        raise ValueError("instances: there is none to choose from")
    scores = [math.inf if math.isnan(score) else float(score) for score in policy(views)]
    order = sorted(range(len(views)), key=lambda place: (scores[place], views[place].instance_id))
    return Decision(
        ranking=tuple(views[place].instance_id for place in order),
        scores={view.instance_id: score for view, score in zip(views, scores, strict=True)},
        skipped=dict(skipped or {}),
    )
