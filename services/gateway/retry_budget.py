"""How many retries there may be."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries: full at first, and each request puts a part of one in.

    One engine's death costs one retry per request that it had, which must be had; a failure of everything must not
    multiply the load.
    """

    def __init__(self, *, most: int, per_request: float) -> None:
        """Hold at most so many."""
        self._most = float(most)
        self._left = float(most)
        self._per_request = per_request

    def earn(self) -> None:
        """Count a request."""
        self._left = min(self._most, self._left + self._per_request)

    def spend(self) -> bool:
        """Take a retry; False where none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
