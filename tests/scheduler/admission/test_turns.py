"""Whose turn it is in the admission queue: by deadline, by priority with ageing, and fairly among tenants."""

from __future__ import annotations

import math
from collections import defaultdict
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission import order
from scheduler.admission.order import (
    AGEING_S,
    TURNS,
    FairTurns,
    WaitingRequest,
    by_arrival,
    by_deadline,
    by_length,
    by_priority,
    turn_named,
)
from tests.strategies import examples


def waiting(*fields: dict[str, object]) -> list[WaitingRequest]:
    """Waiting requests, by arrival."""
    return [WaitingRequest(number=number, **one) for number, one in enumerate(fields)]  # type: ignore[arg-type]


def served_in_turn(turn: order.HeadOf, requests: list[WaitingRequest], now_s: float = 0.0) -> list[int]:
    """The order in which all of them are admitted."""
    left, numbers = list(requests), []
    while left:
        number = turn(left, now_s)
        (one,) = [one for one in left if one.number == number]
        if isinstance(turn, FairTurns):
            turn.served(one.tenant, one.num_tokens)
        left.remove(one)
        numbers.append(number)
    return numbers


def test_arrival_is_the_order_of_numbers() -> None:
    """Whatever the requests ask for."""
    requests = waiting({"due_s": 9.0}, {"due_s": 1.0, "priority": -5})
    assert served_in_turn(by_arrival, requests) == [0, 1]


def test_the_first_token_that_is_due_first_goes_first() -> None:
    """Equal ones by arrival; requests without a deadline come last, by arrival."""
    requests = waiting({}, {"due_s": 7.0}, {"due_s": 3.0}, {"due_s": math.inf}, {"due_s": 3.0})
    assert served_in_turn(by_deadline, requests) == [2, 4, 1, 0, 3]


def test_the_shortest_request_goes_first() -> None:
    """By the tokens of prompt and predicted response; equal ones by arrival."""
    requests = waiting({"num_tokens": 9.0}, {"num_tokens": 7.0}, {"num_tokens": 3.0}, {"num_tokens": 7.0})
    assert served_in_turn(by_length, requests) == [2, 1, 3, 0]


def test_the_lowest_priority_number_goes_first_and_waiting_counts() -> None:
    """Ten seconds count as one step; equal ones go by arrival."""
    requests = waiting({"priority": 1}, {"priority": 0, "joined_s": 5.0}, {"priority": 1}, {"priority": -1})
    assert served_in_turn(by_priority, requests, 6.0) == [3, 1, 0, 2]
    assert by_priority(requests[:2], 6.0) == 1
    aged = waiting({"priority": 1}, {"priority": 0, "joined_s": AGEING_S + 1.0})
    assert by_priority(aged, AGEING_S + 1.0) == 0


@examples(100)
@given(priority=st.integers(-3, 3), others=st.integers(-3, 3), every_s=st.floats(0.1, 3.0))
def test_ageing_ends_starvation(priority: int, others: int, every_s: float) -> None:
    """However many requests of a better priority arrive, one waits at most ten seconds for each step between them."""
    waiting_one = WaitingRequest(number=0, priority=priority)
    bound_s = AGEING_S * max(0, priority - others)
    now_s, number = 0.0, 0
    while now_s <= bound_s + every_s:  # each time one arrives, and one is admitted
        number += 1
        newest = WaitingRequest(number=number, priority=others, joined_s=now_s)
        if by_priority([waiting_one, newest], now_s) == 0:
            assert now_s >= bound_s - 1e-6
            return
        now_s += every_s
    raise AssertionError(f"it still waits after {now_s} s")


def test_tenants_take_turns_by_tokens() -> None:
    """One with small requests gets several of them for each large one of the other."""
    requests = waiting(
        *({"tenant": "a", "num_tokens": 30.0} for _ in range(3)),
        *({"tenant": "b", "num_tokens": 10.0} for _ in range(6)),
    )
    assert served_in_turn(FairTurns(), requests) == [0, 3, 4, 5, 1, 6, 7, 8, 2]


def test_nobody_saves_up_turns() -> None:
    """A tenant that comes, or comes back, starts level with the one that was served fewest, not below it."""
    turns = FairTurns()
    turns.served("b", 10.0)
    for _ in range(5):
        turns.served("a", 100.0)
    both = waiting(*({"tenant": name, "num_tokens": 100.0} for name in "aabbcc"))
    tenants = [both[number].tenant for number in served_in_turn(turns, both)]
    assert sorted(tenants[:2]) == ["b", "c"]
    assert tenants[2] == "a", "neither has a second turn before it"


@examples(200)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 200)), min_size=1, max_size=60),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 500)), max_size=10),
)
def test_backlogged_tenants_get_tokens_within_one_request_of_each_other(
    requests: list[tuple[str, int]], before: list[tuple[str, int]]
) -> None:
    """At any time while both have waiting requests, whatever they were served before."""
    turns = FairTurns()
    for tenant, tokens in before:
        turns.served(tenant, tokens)
    level = min((turns.tokens_of(name) for name in "abc"), default=0.0)
    served = {name: turns.tokens_of(name) - level for name in "abc"}  # what is still counted of it
    left = waiting(*({"tenant": tenant, "num_tokens": float(tokens)} for tenant, tokens in requests))
    largest = max([*(tokens for _, tokens in requests), *served.values()])
    while left:
        backlogged = {one.tenant for one in left}
        counts = [served[name] for name in backlogged]
        assert max(counts) - min(counts) <= largest
        number = turns(left, 0.0)
        (one,) = [one for one in left if one.number == number]
        assert served[one.tenant] == min(counts)
        assert one.number == min(other.number for other in left if other.tenant == one.tenant)
        turns.served(one.tenant, one.num_tokens)
        served[one.tenant] += one.num_tokens
        left.remove(one)


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=300))
def test_the_number_of_tenants_that_are_remembered_is_bounded(requests: list[tuple[int, int]]) -> None:
    """Also where each of them comes once; those who are most ahead are remembered."""
    with mock.patch.object(order, "MAX_TENANTS", 10):
        turns, totals = FairTurns(), defaultdict(float)
        turns.served("flood", 10_000.0)
        for tenant, tokens in requests:
            turns.served(f"t{tenant}", tokens)
            totals[tenant] += tokens
            assert len(turns._served) <= 10
        assert turns.tokens_of("flood") == 10_000.0


def test_an_order_by_name() -> None:
    """Fair turns remember nothing of other schedulers; an unknown name is refused with the closest one."""
    for name, turn in (("arrival", by_arrival), ("deadline", by_deadline), ("shortest", by_length)):
        assert turn_named(name) is turn
    assert turn_named("priority") is by_priority
    assert turn_named("fair") is not turn_named("fair")
    with pytest.raises(ValueError, match=r"admission_turn: must be one of .*, not 'fare'; did you mean fair\?"):
        turn_named("fare")
    assert list(TURNS) == ["arrival", "deadline", "shortest", "priority", "fair"]
