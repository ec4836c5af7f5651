"""A limit on the values of a Prometheus label that clients or lists of instances choose."""

from __future__ import annotations

OTHER = "other"
MAX_VALUES = 1000


class BoundedLabel:
    """Keeps the first values of a label; every value after them becomes `other`."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        """Start without values."""
        self._max_values = max_values
        self._values: set[str] = set()

    def __call__(self, value: str) -> str:
        """Return the label of a value."""
        if value in self._values:
            return value
        if len(self._values) >= self._max_values:
            return OTHER
        self._values.add(value)
        return value
