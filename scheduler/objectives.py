"""What requests ask for: class, targets, priority, weight, and what happens where the targets cannot be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from predictor.request import BEST_EFFORT, CLASSES, MAX_PRIORITY, REAL_TIME, Slo

# What becomes of a request whose deadlines no instance can keep any more: it is served late, where that harms the
# others least; it goes on as best effort; or it is refused.
SERVE_LATE, DEMOTE, SHED = "serve", "demote", "shed"
WHEN_LATE = (SERVE_LATE, DEMOTE, SHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a request asks for; `name` is empty where it was not chosen by name."""

    name: str = ""
    request_class: str = REAL_TIME
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    weight: float = 1.0
    when_late: str = SERVE_LATE

    def __post_init__(self) -> None:
        """Refuse what means nothing, naming the field."""
        if self.request_class not in CLASSES:
            raise ValueError(f"class: {self.request_class!r} is neither {' nor '.join(CLASSES)}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority: must be a whole number within 32 bits, not {self.priority!r}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight: must be above 0, not {self.weight}")
        if self.when_late not in WHEN_LATE:
            raise ValueError(f"when_late: {self.when_late!r} is none of {', '.join(WHEN_LATE)}")

    @property
    def is_best_effort(self) -> bool:
        """Whether it has to leave deadlines of real-time requests alone."""
        return self.request_class == BEST_EFFORT


NO_OBJECTIVE = Objective()
