"""What part of the admitted tokens belongs to best effort, so that it gets its share and does not starve."""

from __future__ import annotations

import math

HALF_LIFE_S = 10.0  # after which a token counts half
PAUSE_S = 4 * HALF_LIFE_S  # after which counting starts again


class ClassShares:
    """Counts admitted tokens of both classes; old ones count less and less."""

    def __init__(self) -> None:
        """Start without any token."""
        self._best_effort = self._all = 0.0
        self._since_s = self._counted_s = -math.inf

    def count(self, num_tokens: float, now_s: float, *, best_effort: bool) -> None:
        """Count the tokens of a request that was admitted."""
        if now_s - self._counted_s > PAUSE_S:
            self._best_effort = self._all = 0.0
            self._since_s = self._counted_s = now_s
        decay = left_after(now_s - self._counted_s)
        self._counted_s = max(now_s, self._counted_s)
        self._all = self._all * decay + num_tokens
        self._best_effort = self._best_effort * decay + (num_tokens if best_effort else 0.0)

    def tokens_per_s(self, now_s: float, *, real_time_only: bool = False) -> float:
        """Return the rate of admitted tokens since counting started; 0 where that is not known."""
        if not self._since_s < now_s <= self._counted_s + PAUSE_S:
            return 0.0
        tokens = self._all - self._best_effort if real_time_only else self._all
        counted = tokens * left_after(now_s - self._counted_s)
        return counted * math.log(2) / HALF_LIFE_S / (1.0 - left_after(now_s - self._since_s))

    def is_below(self, share: float) -> bool:
        """Return whether best effort got less than a share of the tokens."""
        return self._best_effort < share * self._all


def left_after(seconds: float) -> float:
    """Return the share of a count that is left after some time."""
    return math.exp2(-max(0.0, seconds) / HALF_LIFE_S)
