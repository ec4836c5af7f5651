"""What an engine's steps took, beside what was foretold of them: for as long as it went from one to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_PLANNED = 4096
MOST_TIMES = 6.0  # as long as was to be expected a step may count: more is a hiccup, and no pace


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Sums over the steps that have ended since they were last taken; foretold seconds are the profile's own.

    What ended last is in no sum yet: the next thing that is seen may show that it was not as it was foretold.
    """

    pace: float = 1.0  # so many times the foretold seconds are to be expected
    real_s: float = 0.0
    foretold_s: float = 0.0
    num_steps: int = 0
    _last: tuple[float, float, int] = (0.0, 0.0, 0)
    began_s: float | None = None  # when the first of those began that have not ended, as far as is known
    planned: list[float] = field(default_factory=list)  # their foretold seconds

    def plan(self, start_s: float, foretold_s: float) -> None:
        """Note a step that begins then."""
        if self.began_s is None or len(self.planned) >= MOST_PLANNED:
            self.began_s = start_s
            self.planned.clear()
        self.planned.append(foretold_s)

    def close(self, end_s: float, num_under_way: int) -> None:
        """Note that all have ended by then but for so many."""
        num_ended = len(self.planned) - num_under_way
        if num_ended <= 0 or self.began_s is None:
            return
        real_s, foretold_s, num_steps = self._last
        self.real_s += real_s
        self.foretold_s += foretold_s
        self.num_steps += num_steps
        foretold_s = math.fsum(self.planned[:num_ended])
        real_s = min(max(0.0, end_s - self.began_s), MOST_TIMES * self.pace * foretold_s)
        self._last = (real_s, foretold_s, num_ended)
        self.began_s = end_s
        del self.planned[:num_ended]

    def cut(self, end_s: float, num_under_way: int) -> None:
        """Note that so many will not be: others begin instead, or none."""
        self.close(end_s, num_under_way)
        self.began_s = None
        self.planned.clear()

    def amend(self, more_s: float) -> None:
        """Have so much more been foretold of what ended last."""
        real_s, foretold_s, num_steps = self._last
        if num_steps:
            self._last = (real_s, foretold_s + more_s, num_steps)

    def lose(self) -> None:
        """Forget what ended last, and all since."""
        self._last = (0.0, 0.0, 0)
        self.began_s = None
        self.planned.clear()

    def taken(self) -> tuple[float, int] | None:
        """Give how many times the foretold seconds the real ones were, and of how many steps; begin new sums."""
        sample = (self.real_s / self.foretold_s, self.num_steps) if self.real_s > 0 and self.foretold_s > 0 else None
        self.real_s = self.foretold_s = 0.0
        self.num_steps = 0
        return sample
