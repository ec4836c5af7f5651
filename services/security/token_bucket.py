"""A rate limit: a bucket that fills steadily, and from which each request takes; pure, the time is passed in."""

from __future__ import annotations

import math


class TokenBucket:
    """Holds at most `capacity` tokens and gains `per_s` of them each second; it is full at first.

    Times never go back: an earlier one counts as the latest. What is given back late, or taken in excess of an
    estimate, is corrected by `take`, which may leave the bucket in debt.
    """

    def __init__(self, *, capacity: float, per_s: float) -> None:
        """Start full."""
        if not (capacity > 0 and per_s > 0):
            raise ValueError("capacity: must be above 0, as must per_s")
        self.capacity = capacity
        self._per_s = per_s
        self._level = capacity
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        """Return what is in the bucket; below 0 where it is in debt."""
        if now_s > self._at_s:
            if self._level < self.capacity:
                self._level = min(self.capacity, self._level + self._per_s * (now_s - self._at_s))
            self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return how long it takes until an amount is there: 0 where it is, infinite where it never will be."""
        if amount > self.capacity:
            return math.inf
        return max(0.0, (amount - self.level(now_s)) / self._per_s)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, whether it is there or not; a negative one is given back, up to a full bucket."""
        self._level = min(self.capacity, self.level(now_s) - amount)

    def reset_s(self, now_s: float) -> float:
        """Return the time until the bucket is full."""
        return max(0.0, (self.capacity - self.level(now_s)) / self._per_s)
