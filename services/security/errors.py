"""Refusals of callers."""

from __future__ import annotations


class UnauthenticatedError(Exception):
    """A call without a valid key; `reason` is one of a few words, for metrics."""

    def __init__(self, message: str, *, reason: str = "invalid_key") -> None:
        """Note why."""
        super().__init__(message)
        self.reason = reason


class NotAllowedError(Exception):
    """A call that its caller may not make."""
