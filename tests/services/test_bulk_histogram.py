"""The histogram that takes many values at once."""

from __future__ import annotations

import numpy as np

from services.bulk_histogram import BulkHistogram


def test_histograms_count_as_prometheus_does() -> None:
    """A value equal to a bound belongs to that bound's bucket, alone or among many."""
    histogram = BulkHistogram((1.0, 2.0, 5.0))
    histogram.observe(1.0)
    histogram.observe_many(np.array([0.5, 2.5, 9.0]))
    histogram.observe_many(np.array([1.5, 2.0]))
    histogram.observe_many(np.empty(0))
    assert histogram.buckets() == ([("1.0", 2), ("2.0", 4), ("5.0", 5), ("+Inf", 6)], 16.5)
    histogram.observe(3.0, 2)
    assert histogram.buckets() == ([("1.0", 2), ("2.0", 4), ("5.0", 7), ("+Inf", 8)], 22.5)
