"""Errors of `Retry-After`."""

from __future__ import annotations

import math

import pytest

from scheduler.admission.lateness import MIN_RETRY_AFTER_S
from simulator.retry_accuracy import RetryTime


@pytest.mark.parametrize(
    ("stated_s", "actual_s", "error"),
    [
        (3.0, 4.0, 0.25),
        (5.0, 4.0, 0.25),
        (MIN_RETRY_AFTER_S, 0.0, 1.0),
        (4.0, math.inf, 1.0),
    ],
)
def test_an_error_is_a_share_of_the_actual_time(stated_s: float, actual_s: float, error: float) -> None:
    """The shortest time that schedulers state counts for shorter ones; a request that is never admitted has a number."""
    assert RetryTime(number=0, stated_s=stated_s, actual_s=actual_s).error == pytest.approx(error)
