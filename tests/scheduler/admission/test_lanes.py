"""Lanes of the admission queue, its limits, and the shares of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission.order import FairTurns, WaitingRequest, by_deadline
from scheduler.admission.queue import NO_NUMBER, AdmissionQueue, lane_of
from scheduler.admission.shares import HALF_LIFE_S, ClassShares
from tests.strategies import examples

STRICT, LOOSE, ANY = (lane_of(tpot_s, background=False) for tpot_s in (0.02, 0.1, math.inf))
BEST_EFFORT = lane_of(math.inf, background=True)


def queue_of(*lanes: int, due_s: Sequence[float] = (), **options: object) -> AdmissionQueue:
    """A queue with a request in each of these lanes, numbered by arrival."""
    queue = AdmissionQueue(**options)  # type: ignore[arg-type]
    for number, lane in enumerate(lanes):
        due = due_s[number] if due_s else math.inf
        queue.join(number, request=WaitingRequest(number=number, lane=lane, due_s=due))
    return queue


def test_stricter_targets_have_lower_lanes_and_background_ones_come_after_all() -> None:
    """Targets within a factor of 1.4 share a lane; extreme ones, and none, have lanes as well."""
    targets = (1e-9, 0.01, 0.02, 0.05, 0.1, 1.0, 1e9, math.inf)
    lanes = [lane_of(tpot_s, background=background) for background in (False, True) for tpot_s in targets]
    assert lanes == sorted(set(lanes))
    assert lane_of(0.05, background=False) == lane_of(0.052, background=False)
    assert lane_of(0.05, background=False) != lane_of(0.08, background=False)
    for senseless in (0.0, -1.0, math.nan):
        assert lane_of(senseless, background=False) == ANY


def test_each_lane_has_its_own_head() -> None:
    """A strict request does not wait behind a loose one that arrived before it; the strictest lane comes first."""
    queue = queue_of(LOOSE, LOOSE, BEST_EFFORT, STRICT, STRICT)
    assert queue.heads(0.0) == [3, 0, 2]
    assert [queue.head(0.0, lane) for lane in (STRICT, LOOSE, BEST_EFFORT, ANY)] == [3, 0, 2, NO_NUMBER]
    assert queue.numbers[0] == 0
    queue.leave(0)
    assert queue.heads(0.0) == [3, 1, 2]
    for number in (3, 4):
        queue.leave(number)
    assert queue.heads(0.0) == [1, 2]
    assert queue.head(0.0, STRICT) == NO_NUMBER


LANES = (STRICT, LOOSE, ANY)
TENANTS = {"small": 1.0, "flood": 1.0, "twice": 2.0}


@examples(100)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(TENANTS)), st.sampled_from(LANES), st.integers(1, 200)),
        min_size=1,
        max_size=60,
    )
)
def test_tenants_take_turns_over_all_lanes(requests: list[tuple[str, int, int]]) -> None:
    """One that waits in several lanes gets no more than one that waits in a single one, and twice as much by weight."""
    queue, got = AdmissionQueue(turn=FairTurns(TENANTS)), dict.fromkeys(TENANTS, 0.0)
    for number, (tenant, lane, tokens) in enumerate(requests):
        queue.join(number, request=WaitingRequest(number=number, lane=lane, tenant=tenant, num_tokens=float(tokens)))
    largest = max(tokens for _, _, tokens in requests)
    while queue:
        waiting = {requests[number][0] for number in queue.numbers}
        counts = [got[tenant] for tenant in waiting]
        assert max(counts) - min(counts) <= largest
        first = queue.heads(0.0)[0]
        tenant, _, tokens = requests[first]
        queue.count_served(tenant, float(tokens))
        queue.leave(first)
        got[tenant] += tokens / TENANTS[tenant]


def test_a_turn_chooses_in_each_lane() -> None:
    """Not among all."""
    queue = queue_of(LOOSE, LOOSE, STRICT, STRICT, due_s=(9.0, 1.0, 4.0, 3.0), turn=by_deadline)
    assert queue.heads(0.0) == [3, 1]


def test_a_request_that_moves_is_ordered_by_its_number_in_the_other_lane() -> None:
    """It keeps its place by arrival, gets another deadline, and counts once."""
    queue = queue_of(STRICT, BEST_EFFORT, STRICT)
    queue.change(7.0, WaitingRequest(number=0, lane=BEST_EFFORT, tenant="a", num_tokens=5.0, best_effort=True))
    assert queue.heads(0.0) == [2, 0]
    assert (queue.lane_of(0), queue.deadline_s(0), queue.numbers, len(queue)) == (BEST_EFFORT, 7.0, [0, 1, 2], 3)
    assert (queue.num_of_tenant("a"), queue.num_of_tenant(""), queue.num_tokens, queue.num_best_effort) == (
        1,
        2,
        5.0,
        1,
    )
    assert not queue.must_leave(0, 6.9)
    assert queue.must_leave(0, 7.0)


def test_an_order_of_the_whole_queue_has_no_lanes() -> None:
    """It chooses among all; whoever asks for the head of a lane gets that one."""
    queue = queue_of(LOOSE, STRICT, order=lambda numbers, _: sorted(numbers, reverse=True))
    assert queue.heads(0.0) == [1]
    assert queue.head(0.0, LOOSE) == queue.head(0.0, STRICT) == 1


def test_where_tokens_are_limited_the_oldest_leaves() -> None:
    """Until the rest fits; a single request that exceeds the limit leaves as well."""
    queue = AdmissionQueue(max_tokens=100.0)
    for number, tokens in enumerate((60.0, 30.0, 90.0)):
        queue.join(number, request=WaitingRequest(number=number, num_tokens=tokens))
        assert queue.is_full == (number == 2)
    assert [queue.must_leave(number, 0.0) for number in range(3)] == [True, False, False]
    queue.leave(0)
    assert [queue.must_leave(number, 0.0) for number in (1, 2)] == [True, False]
    queue.leave(1)
    assert not queue.is_full
    queue.join(3, request=WaitingRequest(number=3, num_tokens=0.1 + 0.2))
    for number in (2, 3):
        queue.leave(number)
    assert queue.num_tokens == 0.0, "rounding errors do not add up"
    queue.join(4, request=WaitingRequest(number=4, num_tokens=101.0))
    assert queue.must_leave(4, 0.0)


@examples(150)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from((STRICT, LOOSE, BEST_EFFORT)), st.integers(0, 50))))
def test_counts_are_those_of_the_waiting_requests(events: list[tuple[int, int, int]]) -> None:
    """Whatever joined, moved and left, in any order."""
    queue, there = AdmissionQueue(), {}
    for number, lane, tokens in events:
        one = WaitingRequest(
            number=number, lane=lane, tenant="ab"[number % 2], num_tokens=tokens, best_effort=lane == BEST_EFFORT
        )
        if number not in there:
            queue.join(number, 1.0, one)
            there[number] = one
        elif there[number].lane != lane:
            queue.change(2.0, one)
            there[number] = one
        else:
            queue.leave(number)
            del there[number]
        waiting = list(there.values())
        assert queue.numbers == sorted(there)
        assert queue.num_tokens == sum(one.num_tokens for one in waiting)
        assert queue.num_best_effort == sum(one.best_effort for one in waiting)
        assert [queue.num_of_tenant(name) for name in "abc"] == [
            sum(one.tenant == name for one in waiting) for name in "abc"
        ]
        firsts = {one.lane: min(other.number for other in waiting if other.lane == one.lane) for one in waiting}
        assert queue.heads(0.0) == [firsts[lane] for lane in sorted(firsts)]
    assert len(queue._num_of_tenant) <= len(there)


# Shares.


def test_best_effort_is_below_its_share_until_it_got_it() -> None:
    """Of all admitted tokens."""
    shares = ClassShares()
    assert not shares.is_below(0.1), "nothing was admitted yet"
    shares.count(900.0, 0.0, best_effort=False)
    assert shares.is_below(0.1)
    assert not shares.is_below(0.0)
    shares.count(99.0, 0.0, best_effort=True)
    assert shares.is_below(0.1)
    shares.count(2.0, 0.0, best_effort=True)
    assert not shares.is_below(0.1)
    assert shares.is_below(0.2)


def test_old_tokens_count_less() -> None:
    """Half as much after each half-life, so that a share is one of the last seconds."""
    shares = ClassShares()
    shares.count(1000.0, 0.0, best_effort=True)
    shares.count(1000.0, 3 * HALF_LIFE_S, best_effort=False)  # an eighth of the former is left
    assert shares.is_below(0.12)
    assert not shares.is_below(0.11)
    shares.count(0.0, 0.0, best_effort=False)  # of an event that is reported late
    assert not shares.is_below(0.11)


def test_counting_starts_again_after_a_pause() -> None:
    """The rate is that since then, and not known at its first moment."""
    shares = ClassShares()
    shares.count(1e6, 0.0, best_effort=True)
    shares.count(50.0, 1200.0, best_effort=False)
    assert shares.tokens_per_s(1200.0) == 0.0
    shares.count(50.0, 1200.5, best_effort=False)
    assert shares.tokens_per_s(1201.0) == pytest.approx(100.0, rel=0.05)
    assert shares.tokens_per_s(1300.0) == 0.0


@pytest.mark.parametrize("period_s", [0.01, 0.5])
def test_the_rate_is_that_of_admitted_tokens(period_s: float) -> None:
    """In a steady state; it decays when nothing is admitted any more."""
    shares = ClassShares()
    assert shares.tokens_per_s(5.0) == 0.0
    end_s = 20 * HALF_LIFE_S
    for step in range(round(end_s / period_s) + 1):
        shares.count(300.0 * period_s, step * period_s, best_effort=False)
    assert shares.tokens_per_s(end_s) == pytest.approx(300.0, rel=0.03)
    assert shares.tokens_per_s(end_s + HALF_LIFE_S) == pytest.approx(150.0, rel=0.03)
