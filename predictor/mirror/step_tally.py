"""The real and the predicted duration of an engine's steps, summed up while one step follows another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_PLANNED = 4096
MAX_SLOWDOWN = 6.0  # times its predicted duration that a step may count: more is a hiccup, and no pace


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Sums over the steps that ended since `take`; predicted seconds are the profile's, without correction.

    The steps that ended last are not in the sums yet: the next event may show that their prediction was wrong.
    """

    pace: float = 1.0  # the current correction of the predicted seconds
    real_s: float = 0.0
    predicted_s: float = 0.0
    num_steps: int = 0
    started_s: float | None = None  # when the first of the planned steps started, if known
    planned: list[float] = field(default_factory=list)  # predicted seconds of the steps that have not ended
    _last: tuple[float, float, int] = (0.0, 0.0, 0)  # real and predicted seconds, number of steps

    def plan(self, start_s: float, predicted_s: float) -> None:
        """Add a step that starts at `start_s`."""
        if self.started_s is None or len(self.planned) >= MAX_PLANNED:
            self.started_s = start_s
            self.planned.clear()
        self.planned.append(predicted_s)

    def close(self, end_s: float, num_under_way: int) -> None:
        """Let all planned steps but the last `num_under_way` have ended at `end_s`."""
        num_ended = len(self.planned) - num_under_way
        if num_ended <= 0 or self.started_s is None:
            return
        real_s, predicted_s, num_steps = self._last
        self.real_s += real_s
        self.predicted_s += predicted_s
        self.num_steps += num_steps
        predicted_s = math.fsum(self.planned[:num_ended])
        real_s = min(max(0.0, end_s - self.started_s), MAX_SLOWDOWN * self.pace * predicted_s)
        self._last = (real_s, predicted_s, num_ended)
        self.started_s = end_s
        del self.planned[:num_ended]

    def cut(self, end_s: float, num_under_way: int) -> None:
        """Close, and remove the steps under way; the engine makes others instead, or none."""
        self.close(end_s, num_under_way)
        self.started_s = None
        self.planned.clear()

    def extend_last(self, predicted_s: float) -> None:
        """Add predicted seconds to the steps that ended last."""
        last_s, last_predicted_s, num_steps = self._last
        if num_steps:
            self._last = (last_s, last_predicted_s + predicted_s, num_steps)

    def discard_last(self) -> None:
        """Remove the steps that ended last, and all planned ones."""
        self._last = (0.0, 0.0, 0)
        self.started_s = None
        self.planned.clear()

    def take(self) -> tuple[float, int] | None:
        """Return the ratio of real to predicted seconds and the number of steps, and reset the sums."""
        has_both = self.real_s > 0 and self.predicted_s > 0
        sample = (self.real_s / self.predicted_s, self.num_steps) if has_both else None
        self.real_s = self.predicted_s = 0.0
        self.num_steps = 0
        return sample
