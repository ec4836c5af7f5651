"""The admission queue, its order of arrival, its limits, and which instances are worth asking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.admission.queue import RETRY_S, AdmissionQueue, RecentRefusals, retry_pause_s
from scheduler.candidates import RequestIndicators
from scheduler.policy import policy_from
from tests.fleets import fleet


def must_leave(queue: AdmissionQueue, now_s: float) -> list[int]:
    """The waiting requests that go now, whether or not an instance admits them, by arrival."""
    return [number for number in queue.numbers if queue.must_leave(number, now_s)]


def test_first_come_first_served() -> None:
    """Numbers order requests by arrival, whenever they join; a request that leaves is gone."""
    queue = AdmissionQueue()
    for number in (3, 1, 2):
        queue.join(number)
    assert (queue.head(0.0), queue.numbers[0], queue.numbers, len(queue)) == (1, 1, [1, 2, 3], 3)
    queue.leave(1)
    assert queue.head(0.0) == 2
    queue.leave(3)
    queue.leave(2)
    assert not queue


def test_another_order_chooses_the_head_by_the_time() -> None:
    """The order sees all waiting requests and the time; the oldest is still the oldest."""
    seen = []

    def last_first(waiting: Sequence[int], now_s: float) -> list[int]:
        seen.append((list(waiting), now_s))
        return list(reversed(waiting))

    queue = AdmissionQueue(order=last_first)
    queue.join(4)
    assert queue.head(1.0) == 4
    queue.join(7)
    queue.join(5)
    assert (queue.head(2.0), queue.numbers[0]) == (7, 4)
    assert seen == [([4, 5, 7], 2.0)]


def test_waiting_time_is_limited() -> None:
    """A request leaves at its deadline, wherever in the queue it is."""
    queue = AdmissionQueue()
    for number, deadline_s in enumerate((5.0, 2.0, math.inf)):
        queue.join(number, deadline_s)
    assert must_leave(queue, 1.9) == []
    assert must_leave(queue, 2.0) == [1]
    assert must_leave(queue, 5.0) == [0, 1]
    assert [queue.deadline_s(number) for number in range(3)] == [5.0, 2.0, math.inf]


def test_the_number_of_waiting_requests_is_limited() -> None:
    """Where there are too many, the oldest leave."""
    queue = AdmissionQueue(max_held=2)
    for number in range(4):
        queue.join(number)
    assert must_leave(queue, 0.0) == [0]  # one after the other
    queue.leave(0)
    assert must_leave(queue, 0.0) == [1]
    assert queue.must_leave(1, 0.0)
    assert not queue.must_leave(2, 0.0)


@pytest.mark.parametrize(("waited_s", "shortest"), [(0.0, 0.5), (1.0, 0.25), (3.0, 0.125), (1000.0, 0.125)])
def test_the_pause_between_attempts_shrinks_with_the_time_waited(waited_s: float, shortest: float) -> None:
    """Down to a quarter, and spread over a factor of three, so that schedulers take turns."""
    assert retry_pause_s(waited_s, 0.0) == pytest.approx(shortest * RETRY_S)
    assert retry_pause_s(waited_s, 1.0) == pytest.approx(3 * shortest * RETRY_S)


def test_an_instance_that_refused_is_asked_again_when_a_request_finished_there_or_after_a_while() -> None:
    """An instance that admitted is always worth asking."""
    refusals = RecentRefusals(3, ask_again_s=0.5)
    finished = np.array([4.0, 4.0, 4.0])
    assert refusals.worth_asking(finished, 0.0).all()
    refusals.note(np.array([True, True, False]), finished, 10.0, None)
    assert refusals.worth_asking(finished, 10.1).tolist() == [False, False, True]
    assert refusals.worth_asking(np.array([4.0, 5.0, 4.0]), 10.1).tolist() == [False, True, True]
    assert refusals.worth_asking(finished, 10.5).all()


def test_refusals_of_some_rows_change_no_others() -> None:
    """Instances that are not asked keep what is known of them."""
    refusals = RecentRefusals(3, ask_again_s=0.5)
    some = np.array([0, 2])
    refusals.note(np.array([True, True]), np.array([4.0, 5.0]), 1.0, some)
    assert refusals.worth_asking(np.array([4.0, 6.0]), 1.1, some).tolist() == [False, True]
    assert refusals.worth_asking(np.array([4.0, 4.0, 5.0]), 1.1).tolist() == [False, True, False]
    refusals.note(np.array([False]), np.array([4.0]), 1.2, np.array([0]))
    assert refusals.worth_asking(np.array([4.0]), 1.3, np.array([0])).tolist() == [True]


def test_an_instance_whose_count_is_not_known_is_asked_after_a_while() -> None:
    """A count that was never reported is no reason to ask at once."""
    refusals = RecentRefusals(1, ask_again_s=0.5)
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
def test_the_condition_decides_which_instances_admit(text: str, admits: list[bool]) -> None:
    """An instance whose value is unknown does not admit."""
    policy = policy_from(text)
    candidates = fleet(
        request=RequestIndicators(prompt_tokens=10),
        predicted_e2e_s=[1.0, 1.0, 1.0, 1.0],
        predicted_queue_s=[0.1, 2.0, 0.1, None],
        predicted_preemptions=[0, 0, 1, 0],
    )
    assert policy.admits(candidates).tolist() == admits
    assert policy.holds == (admits != [True] * 4)
    assert policy.hold_s == 10.0
    assert ("predicted_queue_s" in policy.forecast_fields) == policy.holds
