"""The token bucket against a plain account of all that happened."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.security.token_bucket import TokenBucket

PER_TICK = 64  # ticks of a second, so that times are exact


class Account:
    """Fills tick by tick, in exact numbers."""

    def __init__(self, capacity: int, per_tick: Fraction) -> None:
        """Start full."""
        self.capacity, self.per_tick = Fraction(capacity), per_tick
        self.level = self.capacity

    def wait(self, ticks: int) -> None:
        """Let time pass."""
        for _ in range(ticks):
            self.level = min(self.capacity, self.level + self.per_tick)

    def take(self, amount: int) -> None:
        """Take an amount, which may be negative."""
        self.level = min(self.capacity, self.level - amount)


STEPS = st.lists(st.tuples(st.integers(0, 200), st.integers(-20, 60), st.booleans()), max_size=25)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 128), STEPS)
def test_it_agrees_with_the_account(capacity: int, per_s: int, steps: list[tuple[int, int, bool]]) -> None:
    """Levels are equal at all times, whether requests are admitted by `wait_s` or corrections are forced."""
    bucket = TokenBucket(capacity=capacity, per_s=per_s)
    account = Account(capacity, Fraction(per_s, PER_TICK))
    tick = 0
    for passed, amount, forced in steps:
        tick += passed
        now_s = tick / PER_TICK
        account.wait(passed)
        level = account.level
        assert bucket.level(now_s) == pytest.approx(float(level), abs=1e-6)
        wait_s = bucket.wait_s(amount, now_s)
        if amount > capacity:
            assert wait_s == math.inf
        elif abs(float(level) - amount) > 1e-6:
            assert (wait_s == 0) == (level >= amount)
        if forced or wait_s == 0:
            bucket.take(amount, now_s)
            account.take(amount)


@settings(deadline=None)
@given(st.integers(1, 100), st.floats(0.1, 50), st.lists(st.tuples(st.floats(0, 5), st.integers(1, 30)), max_size=60))
def test_no_window_has_more_than_a_full_bucket_and_what_flows_in(
    capacity: int, per_s: float, asked: list[tuple[float, int]]
) -> None:
    """Whatever is asked for, what is admitted within any time is bounded; and who waits as told is admitted."""
    bucket, now_s = TokenBucket(capacity=capacity, per_s=per_s), 0.0
    admitted: list[tuple[float, int]] = []
    for passed, amount in asked:
        now_s += passed
        wait_s = bucket.wait_s(amount, now_s)
        if math.isinf(wait_s):
            assert amount > capacity
            continue
        if wait_s > 0:
            now_s += wait_s * (1 + 1e-9) + 1e-9
            assert bucket.wait_s(amount, now_s) <= 1e-6
        bucket.take(amount, now_s)
        admitted.append((now_s, amount))
    for start in range(len(admitted)):
        total = 0
        for at_s, amount in admitted[start:]:
            total += amount
            assert total <= capacity + per_s * (at_s - admitted[start][0]) + 1e-3


def test_time_does_not_go_back_and_debts_are_paid() -> None:
    """An earlier time counts as the latest; a debt delays what comes next; giving back fills at most to the brim."""
    bucket = TokenBucket(capacity=10, per_s=1)
    bucket.take(10, 100.0)
    assert bucket.level(50.0) == 0
    bucket.take(5, 100.0)
    assert bucket.wait_s(1, 100.0) == 6
    assert bucket.reset_s(100.0) == 15
    bucket.take(-100, 100.0)
    assert bucket.level(100.0) == 10
    for bad in ({"capacity": 0, "per_s": 1}, {"capacity": 1, "per_s": 0}):
        with pytest.raises(ValueError, match="capacity"):
            TokenBucket(**bad)
