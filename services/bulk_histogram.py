"""A histogram that takes many values at once; a collector reads it when Prometheus scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np


class BulkHistogram:
    """Counts of values by bucket; takes many values at once, most of which are equal."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start empty."""
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def observe_many(self, values: np.ndarray) -> None:
        """Count values."""
        if len(values) == 0:
            return
        self._sum += float(values.sum())
        bucket = bisect_left(self._bounds, values.min())
        if bucket == bisect_left(self._bounds, values.max()):
            self._counts[bucket] += len(values)
            return
        for value in values.tolist():
            self._counts[bisect_left(self._bounds, value)] += 1

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum, as Prometheus wants them."""
        bounds = [*(repr(bound) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum
