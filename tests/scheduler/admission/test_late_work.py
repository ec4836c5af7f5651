"""Which requests drop their deadlines under overload, and how long that lasts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from scheduler.admission.late_work import MIN_ARRIVALS, OVERLOAD_S, LateWork

LANE, OTHER = -10, -6
CAPACITY = 0.8  # of the work that arrives, which is served in time


def heavy_tailed(num: int, seed: int = 1) -> Iterator[float]:
    """Works with a mean of about one second, a tenth of which have half of it."""
    rng = random.Random(seed)
    for _ in range(num):
        yield rng.uniform(4.0, 6.0) if rng.random() < 0.1 else rng.uniform(0.4, 0.7)


def overloaded(works: LateWork, num: int, *, long: float = 2.5) -> tuple[list[float], list[float]]:
    """Have requests arrive, ten a second; return the works of those that were deferred, and became late else.

    Every request that is not deferred is late by chance, as often as the rest exceeds the capacity.
    """
    rng = random.Random(2)
    deferred: list[float] = []
    late: list[float] = []
    total_s = deferred_s = 0.0
    for number, work_s in enumerate(heavy_tailed(num)):
        now_s = number / 10.0
        total_s += work_s
        if works.arrived(LANE, work_s, now_s, long=long):
            deferred.append(work_s)
            deferred_s += work_s
            continue
        excess = max(0.0, 1.0 - CAPACITY * total_s / (total_s - deferred_s))
        if rng.random() < excess:
            late.append(work_s)
            works.became_late(LANE, work_s, now_s)
    return deferred, late


def test_without_late_work_nothing_is_deferred() -> None:
    """However long it takes."""
    works = LateWork()
    assert not any(
        works.arrived(LANE, work_s, 0.1 * number, long=0.0) for number, work_s in enumerate([1.0, 99.0] * 100)
    )


def test_the_longest_requests_are_deferred_and_few_others_late() -> None:
    """A fifth of the work has to be late: some of the long requests have it, hardly any of the short ones."""
    works = LateWork()
    deferred, late = overloaded(works, 4000)
    assert min(deferred) > 4.0
    assert 80 < len(deferred) < 300  # of about 400 long ones
    assert len(deferred) + len(late) < 0.15 * 4000  # not a fifth
    assert sum(deferred) > 2 * sum(late)


def test_only_requests_that_take_long_are_deferred() -> None:
    """Not where all are alike, as long as `long` is more than one."""
    works = LateWork()
    for number in range(1000):
        assert not works.arrived(LANE, 1.0 + 0.5 * (number % 2), 0.1 * number, long=2.5)
        works.became_late(LANE, 0.3, 0.1 * number)
    assert not overloaded(LateWork(), 2000, long=100.0)[0]


@pytest.mark.parametrize(("share", "times"), [(0.03, 2.0), (0.095, 1.5), (0.3, 1.0)])
def test_in_light_overload_only_requests_that_take_twice_as_long_are_deferred(share: float, times: float) -> None:
    """By the share of the work of all lanes that is late; what is late in another lane counts as well."""
    works = LateWork()
    for _ in range(499):  # at one moment, so that nothing decays
        works.arrived(LANE, 1.0, 0.0, long=99.0)
        works.arrived(OTHER, 1.0, 0.0, long=99.0)
        works.became_late(LANE, share, 0.0)
        works.became_late(OTHER, share, 0.0)
    mean_s = 1.01  # of the last 512, with one of the requests below
    assert not works.arrived(LANE, 2.5 * times * mean_s * 0.98, 0.0, long=2.5)
    assert works.arrived(LANE, 2.5 * times * mean_s * 1.02, 0.0, long=2.5)


def test_deferring_ends_with_the_overload() -> None:
    """Deferred work alone does not keep it going."""
    works = LateWork()
    overloaded(works, 2000)
    deferred = [
        number
        for number, work_s in enumerate(heavy_tailed(4000, seed=3))
        if works.arrived(LANE, work_s, 200.0 + number / 10.0, long=2.5)
    ]
    assert len(deferred) < 40
    assert max(deferred, default=0) < 1500


def test_what_was_late_long_ago_defers_nothing() -> None:
    """Also where hardly any request comes."""
    works = LateWork()
    overloaded(works, 2000)
    assert works.arrived(LANE, 6.0, 200.0, long=2.5)
    assert not any(works.arrived(LANE, 6.0, 86_400.0 + 60.0 * number, long=2.5) for number in range(20))


def test_lanes_have_their_own_work() -> None:
    """A lane in which all is in time defers no request, whatever happens in another one."""
    works = LateWork()
    overloaded(works, 1000)
    assert not any(works.arrived(OTHER, work_s, 100.0, long=2.5) for work_s in heavy_tailed(500))


def test_a_few_requests_do_not_show_which_are_long() -> None:
    """Where few have arrived, none is deferred."""
    works = LateWork()
    for number in range(MIN_ARRIVALS - 1):
        works.became_late(LANE, 1.0, 0.1 * number)
        assert not works.arrived(LANE, 100.0 * (number + 1) ** 2, 0.1 * number, long=0.5)


def test_it_is_overload_while_requests_have_to_wait() -> None:
    """And for some seconds after it, whatever the order in which callers with different clocks say so."""
    works = LateWork()
    assert not works.is_overload(0.0)
    works.waits(20.0)
    works.waits(19.0)
    assert works.is_overload(20.0)
    assert works.is_overload(20.0 + OVERLOAD_S - 0.1)
    assert not works.is_overload(20.0 + OVERLOAD_S)
