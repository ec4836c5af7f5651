"""Who is held, whose turn it is, and who is worth asking."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scheduler.holding import Queue, Refusals

from scheduler.candidates import Facts
from scheduler.policy import policy_from
from tests.fleets import fleet


def test_first_come_first_served() -> None:
    """Numbers tell who came first, whenever they join; who leaves is gone."""
    queue = Queue()
    for number in (3, 1, 2):
        queue.join(number)
    assert (queue.first, queue.numbers, len(queue)) == (1, [1, 2, 3], 3)
    queue.leave(1)
    assert queue.first == 2
    queue.leave(3)
    queue.leave(2)
    assert not queue


def test_time_is_limited() -> None:
    """Who has waited for as long as it may goes, wherever in the line it is."""
    queue = Queue()
    for number, until_s in enumerate((5.0, 2.0, math.inf)):
        queue.join(number, until_s)
    assert queue.must_go(1.9) == []
    assert queue.must_go(2.0) == [1]
    assert queue.must_go(5.0) == [0, 1]


def test_room_is_limited() -> None:
    """Where there are too many, those go that came first."""
    queue = Queue(most=2)
    for number in range(4):
        queue.join(number)
    assert queue.must_go(0.0) == [0, 1]
    queue.leave(0)
    assert queue.must_go(0.0) == [1]
    assert queue.has_to_go(1, 0.0)
    assert not queue.has_to_go(2, 0.0)


def test_who_refused_is_asked_again_when_something_has_ended_or_after_a_while() -> None:
    """Whoever admitted is always worth asking."""
    refusals = Refusals(3, again_s=0.5)
    finished = np.array([4.0, 4.0, 4.0])
    assert refusals.worth_asking(finished, 0.0).all()
    refusals.note(np.array([True, True, False]), finished, 10.0, None)
    assert refusals.worth_asking(finished, 10.1).tolist() == [False, False, True]
    assert refusals.worth_asking(np.array([4.0, 5.0, 4.0]), 10.1).tolist() == [False, True, True]
    assert refusals.worth_asking(finished, 10.5).all()


def test_refusals_are_known_of_some_places() -> None:
    """Instances that are not asked keep what is known of them."""
    refusals = Refusals(3, again_s=0.5)
    some = np.array([0, 2])
    refusals.note(np.array([True, True]), np.array([4.0, 5.0]), 1.0, some)
    assert refusals.worth_asking(np.array([4.0, 6.0]), 1.1, some).tolist() == [False, True]
    assert refusals.worth_asking(np.array([4.0, 4.0, 5.0]), 1.1).tolist() == [False, True, False]
    refusals.note(np.array([False]), np.array([4.0]), 1.2, np.array([0]))
    assert refusals.worth_asking(np.array([4.0]), 1.3, np.array([0])).tolist() == [True]


def test_an_instance_whose_count_is_not_known_is_asked_after_a_while() -> None:
    """What was never told is no reason to ask at once."""
    refusals = Refusals(1, again_s=0.5)
    unknown = np.array([np.nan])
    assert refusals.worth_asking(unknown, 0.0).all()
    refusals.note(np.array([False]), unknown, 0.9, None)
    assert refusals.worth_asking(unknown, 0.9).all()
    refusals.note(np.array([True]), unknown, 1.0, None)
    assert not refusals.worth_asking(unknown, 1.2).any()
    assert refusals.worth_asking(unknown, 1.5).all()


@pytest.mark.parametrize(
    ("text", "admits"),
    [
        ("hold", [True, False, False, False]),
        ('hold: hold = "predicted_queue_s < 5"', [True, True, True, False]),
        ('block: hold = "predicted_queue_s < 1"', [True, False, True, False]),
        ('hold: hold = ""', [True, True, True, True]),
        ("block", [True, True, True, True]),
    ],
)
def test_who_admits_is_told_by_the_condition(text: str, admits: list[bool]) -> None:
    """What is not known of an instance does not speak for it."""
    policy = policy_from(text)
    candidates = fleet(
        facts=Facts(prompt_tokens=10),
        predicted_e2e_s=[1.0, 1.0, 1.0, 1.0],
        predicted_queue_s=[0.1, 2.0, 0.1, None],
        predicted_preemptions=[0, 0, 1, 0],
    )
    assert policy.admits(candidates).tolist() == admits
    assert policy.holds == (admits != [True] * 4)
    assert policy.hold_s == 10.0
    assert ("predicted_queue_s" in policy.foretold) == policy.holds
