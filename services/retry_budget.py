"""A budget of retries: they are a fraction of the requests in the long run."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries: full at first, and each request adds a fraction of one.

    One engine's failure costs one retry for each request that it had, and these must be possible; a failure of all
    engines must not multiply the load.
    """

    def __init__(self, *, max_retries: int, per_request: float) -> None:
        """Start full."""
        self._max_retries = float(max_retries)
        self._left = float(max_retries)
        self._per_request = per_request

    def earn(self) -> None:
        """Count a request."""
        self._left = min(self._max_retries, self._left + self._per_request)

    def spend(self) -> bool:
        """Take a retry; False where none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Return a retry that was not made."""
        self._left = min(self._max_retries, self._left + 1)
