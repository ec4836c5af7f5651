"""Pauses between retries: they double, have a bound, and spread."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.backoff import Backoff


def test_pauses_double_up_to_the_bound_and_start_again_after_a_success() -> None:
    """Without a generator the pauses are exact."""
    backoff = Backoff(first_s=0.25, max_s=1.5)
    assert [backoff.next_s() for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    backoff.reset()
    assert backoff.next_s() == 0.25


@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(0, 2000))
def test_a_pause_is_shortened_by_at_most_its_jitter(seed: int, jitter: float, num_pauses: int) -> None:
    """However many retries failed, the pause stays within its bounds."""
    exact = Backoff(first_s=0.1, max_s=30.0).pause_s(num_pauses)
    pause_s = Backoff(first_s=0.1, max_s=30.0, jitter=jitter, random=Random(seed).random).pause_s(num_pauses)
    assert exact * (1 - jitter) <= pause_s <= exact <= 30.0


def test_two_clients_do_not_retry_together() -> None:
    """Different generators give different pauses."""
    pauses = {Backoff(first_s=1.0, max_s=8.0, random=Random(seed).random).next_s() for seed in range(10)}
    assert len(pauses) == 10


@pytest.mark.parametrize(
    ("values", "field"), [({"first_s": -1.0}, "first_s"), ({"first_s": 9.0}, "first_s"), ({"jitter": 1.5}, "jitter")]
)
def test_impossible_values_are_refused_by_name(values: dict[str, float], field: str) -> None:
    """A pause is at least 0 and at most its bound."""
    with pytest.raises(ValueError, match=f"{field}: must lie between"):
        Backoff(**{"first_s": 0.5, "max_s": 8.0, **values})
