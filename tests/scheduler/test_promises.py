"""Decisions of requests with deadlines: held while there is time, then late, demoted or shed; and best effort."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from scheduler.admission.late_work import DEFERRED, OVERLOAD_S, LateWork
from scheduler.admission.queue import RETRY_S, lane_of
from scheduler.admission.wait import MAX_BACKGROUND_WAIT_S, MAX_LATE_S
from scheduler.candidates import RequestIndicators
from scheduler.core import SchedulerCore
from scheduler.decision import Decision
from scheduler.explanation import why
from scheduler.instances import CLASS_LIMIT, LATE, QUEUE_FULL, TENANT_LIMIT, TIMEOUT, OverloadedError
from scheduler.intentions import Answer, Ask, Intention, Placed, Reserve, Shed, Wait
from scheduler.objectives import DEMOTE, SERVE_LATE, SHED, Objective
from scheduler.placement import PlacementRequest
from tests.scheduler.scenarios import promises
from tests.scheduler.scripted import EPOCH, Record, ReferenceDriver, Script, forecast_of, recording
from tests.scheduler.test_decision import FORECAST, core_over, report, reserve_at
from tests.strategies import examples

POLICY = "slo: backlog = 0.3, slack = 0.05, late_slack = 1.0"
PLACING_S = 0.1  # from the start of a request to its first token
NOW_S = 100.0


def deadline_core(names: str = "ab", policy: str = POLICY, **rules: Any) -> SchedulerCore:
    """A core over instances, the first of which is the least loaded."""
    core = core_over(names, policy, **rules)
    for place, name in enumerate(names):
        report(core, name, decode_step_s=0.01 * (place + 1), queued_prefill_s=0.0, least_tpot_slo_s=math.inf)
    return core


def place(
    core: SchedulerCore, now_s: float = NOW_S, *, when_late: str = SERVE_LATE, ttft_s: float | None = 1.0, **fields: Any
) -> tuple[Decision, Intention]:
    """Start the decision of a real-time request that arrives now."""
    slo = Slo(ttft_s=ttft_s, tpot_s=fields.pop("tpot_s", 0.05))
    return start(core, Objective(slo=slo, when_late=when_late, weight=fields.pop("weight", 1.0)), now_s, **fields)


def place_best_effort(core: SchedulerCore, now_s: float = NOW_S, **fields: Any) -> tuple[Decision, Intention]:
    """Start the decision of a best-effort request that arrives now."""
    return start(core, Objective(request_class=BEST_EFFORT), now_s, **fields)


def start(core: SchedulerCore, objective: Objective, now_s: float, **fields: Any) -> tuple[Decision, Intention]:
    """Start a decision."""
    slo = objective.slo
    indicators = RequestIndicators(
        prompt_tokens=fields.pop("prompt_tokens", 60),
        tag_tokens=40.0,
        due_s=math.inf if slo.ttft_s is None else now_s + slo.ttft_s,
        tpot_slo_s=math.inf if slo.tpot_s is None else slo.tpot_s,
    )
    decision = core.decision(PlacementRequest(indicators=indicators, objective=objective, arrived_s=now_s, **fields))
    return decision, decision.start(now_s)


def answered(
    decision: Decision,
    intention: Intention,
    now_s: float = NOW_S,
    *,
    attained: str = "",
    harmful: str = "",
    scarce: str = "",
    queue_s: float = 0.0,
) -> Intention:
    """Answer: some instances keep the request's deadlines; some would break those of others, or nearly so."""
    assert isinstance(intention, Ask), intention
    answers = {}
    for name in intention.instance_ids:
        keeps = name in attained
        forecast = forecast_of(
            3.0, queue_s=0.0 if keeps else queue_s, ttft_s=PLACING_S, delays=True, attained=keeps,
            others_missed=int(name in harmful),
        )  # fmt: skip
        slack_s = 0.9 if name in scarce else 1.1
        answers[name] = Answer(FORECAST, replace(forecast, least_slack_s=slack_s), 0, EPOCH)
    return decision.answers(answers, now_s)


def admit(decision: Decision, intention: Intention, now_s: float = NOW_S) -> str:
    """Have a reservation made; return where."""
    name = reserve_at(intention)
    assert isinstance(decision.reserved(10.0, now_s), Placed)
    return name


def shed_because(intention: Intention) -> str:
    """Why a request is shed."""
    assert isinstance(intention, Shed), intention
    assert isinstance(intention.error, OverloadedError)
    assert intention.retry_after_s == intention.error.retry_after_s
    return intention.error.reason


def test_an_instance_that_keeps_all_deadlines_gets_the_request() -> None:
    """Not the least loaded one, where it would be late, nor one where others would be."""
    core = deadline_core("abc")
    decision, ask = place(core)
    assert admit(decision, answered(decision, ask, attained="bc", harmful="b")) == "c"
    assert decision.is_admitted
    assert core.num_waiting == 0


def test_a_request_waits_while_there_is_time_left() -> None:
    """Until an idle instance could only just deliver its first token in time: then all instances are asked."""
    core = deadline_core()
    decision, ask = place(core, when_late=SHED)
    wait = answered(decision, ask, NOW_S + 0.01)
    assert isinstance(wait, Wait)
    assert NOW_S + 0.01 < wait.until_s <= NOW_S + 0.01 + 2 * RETRY_S
    moments = [wait.until_s]
    while isinstance(intention := decision.tick(moments[-1]), Wait | Ask) and moments[-1] < NOW_S + 0.9 - 1e-9:
        if isinstance(intention, Ask):
            intention = answered(decision, intention, moments[-1])
        assert isinstance(intention, Wait)
        assert intention.until_s > moments[-1], "time goes on"
        moments.append(intention.until_s)
    assert moments[-1] == pytest.approx(NOW_S + 1.0 - PLACING_S)
    assert isinstance(intention, Ask)
    assert intention.instance_ids == ("a", "b"), "all are asked, whether or not they refused just now"
    assert shed_because(answered(decision, intention, moments[-1])) == LATE
    assert core.num_waiting == 0


def test_a_request_is_late_when_no_instance_could_deliver_in_time_any_more() -> None:
    """By the forecasts of all instances, with their queues: another one that can still be in time gets its turn."""
    core = deadline_core()
    decision, ask = place(core, when_late=SHED)
    assert isinstance(answered(decision, ask, queue_s=0.5), Wait)
    ask = decision.tick(NOW_S + 1.0 - 0.5 - PLACING_S)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a", "b")
    assert shed_because(answered(decision, ask, NOW_S + 0.4, queue_s=0.5)) == LATE


def test_a_request_that_cannot_be_in_time_gives_up_its_deadlines_while_it_waits() -> None:
    """With the queues that instances have, as one that is to be shed: those behind it can still be in time."""
    core = deadline_core()
    decision, ask = place(core)
    assert isinstance(answered(decision, ask, queue_s=0.95), Wait)
    queue = core.queue("")
    assert queue is not None
    assert queue.lane_of(decision.admission.number) == lane_of(math.inf, background=True)


def test_a_late_request_waits_for_those_that_can_be_in_time() -> None:
    """Unless these are stricter than some instance, which could not take them."""
    core = deadline_core()
    for name in "ab":
        report(core, name, decode_step_s=0.01, queued_prefill_s=0.0, least_tpot_slo_s=0.05, num_running=1)
    timely, ask = place(core)
    assert isinstance(answered(timely, ask, attained="ab", harmful="ab"), Wait)
    decision, _ = place(core, ttft_s=PLACING_S / 2)
    assert isinstance(answered(decision, decision.tick(NOW_S)), Wait)
    ask = timely.tick(NOW_S + 0.2)
    assert admit(timely, answered(timely, ask, NOW_S + 0.2, attained="a"), NOW_S + 0.2) == "a"
    assert core.ready[-1] is decision
    ask = decision.tick(NOW_S + 0.2)
    assert admit(decision, answered(decision, ask, NOW_S + 0.2), NOW_S + 0.2) == "a"


def test_a_late_request_does_not_wait_for_stricter_ones() -> None:
    """An instance that serves looser requests has no use for them."""
    core = deadline_core()
    for name, least_s in (("a", 0.02), ("b", 0.1)):
        report(core, name, decode_step_s=0.001, queued_prefill_s=0.0, least_tpot_slo_s=least_s, num_running=1)
    strict, ask = place(core, tpot_s=0.02)
    assert isinstance(answered(strict, ask, attained="ab", harmful="a"), Wait)
    decision, ask = late(core, SERVE_LATE, tpot_s=0.1)
    assert admit(decision, answered(decision, ask, harmful="a")) == "b"


def test_a_waiting_request_asks_no_instance_of_a_looser_tier() -> None:
    """At the last moment all are asked."""
    core = deadline_core()
    for name, least_s in (("a", 0.02), ("b", 0.1)):
        report(core, name, decode_step_s=0.001, queued_prefill_s=0.0, least_tpot_slo_s=least_s, num_running=1)
    decision, ask = place(core, tpot_s=0.02)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a",)
    wait = answered(decision, ask, attained="a", harmful="a")
    assert isinstance(wait, Wait)
    now_s = NOW_S + 1.0 - PLACING_S
    ask = decision.tick(now_s)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a", "b")


def test_a_short_request_is_tried_where_a_long_one_has_just_been_refused() -> None:
    """Before its turn, and on the same instances; one that is as long waits for its turn."""
    core = deadline_core()
    head, ask = place(core, prompt_tokens=200)
    answered(head, ask, attained="ab", harmful="ab")
    place(core, prompt_tokens=200)
    short, wait = place(core, prompt_tokens=60)
    assert isinstance(wait, Wait)
    now_s = NOW_S + 0.2
    assert isinstance(answered(head, head.tick(now_s), now_s, attained="ab", harmful="ab"), Wait)
    assert list(core.ready) == [short]
    ask = short.tick(now_s)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a", "b")
    assert admit(short, answered(short, ask, now_s, attained="b"), now_s) == "b"


def test_a_short_request_does_not_pass_where_tenants_take_turns() -> None:
    """Nor where another order than arrival is asked for."""
    core = deadline_core(admission_turn="fair")
    head, ask = place(core, prompt_tokens=200, client_id="x")
    answered(head, ask, attained="ab", harmful="ab")
    place(core, prompt_tokens=60, client_id="y")
    answered(head, head.tick(NOW_S + 0.2), NOW_S + 0.2, attained="ab", harmful="ab")
    assert not core.ready


def test_a_request_is_not_late_because_of_one_instance_of_several() -> None:
    """Those that refused it just now are asked again before it is."""
    core = deadline_core()
    load = {"decode_step_s": 0.01, "queued_prefill_s": 0.0, "least_tpot_slo_s": math.inf}
    for name in "ab":
        report(core, name, num_finished_total=3.0, **load)
    decision, ask = place(core, when_late=SHED)
    answered(decision, ask)
    report(core, "a", num_finished_total=4.0, **load)
    ask = decision.tick(NOW_S + 0.09)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a",)
    assert isinstance(answered(decision, ask, NOW_S + 0.09, queue_s=5.0), Wait)


@pytest.mark.parametrize(
    ("turn", "first", "second", "may"),
    [
        ("fair", {"client_id": "x"}, {"client_id": "y"}, False),
        ("fair", {"client_id": "x"}, {"client_id": "x"}, True),
        ("arrival", {"client_id": "x"}, {"client_id": "y"}, True),
    ],
)
def test_only_time_gives_a_request_a_last_attempt_before_its_turn(
    turn: str, first: dict[str, str], second: dict[str, str], *, may: bool
) -> None:
    """It is tried at its last moment, unless it is another tenant's turn: then it is late."""
    core = deadline_core(admission_turn=turn)
    head, ask = place(core, **first, ttft_s=5.0)  # type: ignore[arg-type]
    answered(head, ask)
    decision, wait = place(core, when_late=SHED, **second)  # type: ignore[arg-type]
    assert isinstance(wait, Wait)
    assert wait.until_s == pytest.approx(NOW_S + 1.0 - PLACING_S)
    intention = decision.tick(wait.until_s)
    if may:
        assert admit(decision, answered(decision, intention, wait.until_s, attained="a"), wait.until_s) == "a"
    else:
        assert shed_because(intention) == LATE
        assert list(core.ready) == [head]


def late(core: SchedulerCore, when_late: str, **fields: Any) -> tuple[Decision, Ask]:
    """A request that no idle instance could serve in time."""
    return late_at(core, NOW_S, when_late=when_late, **fields)


def late_at(core: SchedulerCore, now_s: float, **fields: Any) -> tuple[Decision, Ask]:
    """The same at another time."""
    decision, ask = place(core, now_s, ttft_s=PLACING_S / 2, **fields)
    assert isinstance(ask, Ask)
    return decision, ask


def test_a_late_request_is_served_where_no_other_misses_a_deadline() -> None:
    """Its objective stays; the instance need not keep its deadlines, as none can."""
    core = deadline_core()
    decision, ask = late(core, SERVE_LATE)
    assert admit(decision, answered(decision, ask, harmful="a")) == "b"
    assert decision.request.objective.request_class == REAL_TIME
    assert decision.request.objective.slo.tpot_s == 0.05


def test_a_late_request_leaves_others_some_slack() -> None:
    """Otherwise the next request with deadlines would find no room; one that can be in time may use all of it."""
    core = deadline_core()
    decision, ask = late(core, SERVE_LATE)
    assert admit(decision, answered(decision, ask, scarce="a")) == "b"
    waiting, ask = late(core, SERVE_LATE)
    assert isinstance(answered(waiting, ask, scarce="ab"), Wait)
    timely, ask = place(core)
    assert admit(timely, answered(timely, ask, attained="ab", scarce="ab")) == "a"


def test_a_late_request_waits_while_others_would_miss_deadlines_everywhere() -> None:
    """In a lane of its own, for as long as the caller allows; then the best instance gets it."""
    core = deadline_core()
    max_wait_s = MAX_LATE_S / 2
    decision, ask = late(core, SERVE_LATE, max_wait_s=max_wait_s)
    wait = answered(decision, ask, harmful="ab")
    assert isinstance(wait, Wait)
    queue = core.queue("")
    assert queue is not None
    assert queue.lane_of(decision.admission.number) == lane_of(math.inf, background=True)
    assert queue.deadline_s(decision.admission.number) == NOW_S + max_wait_s
    strict, ask = place(core)
    assert isinstance(ask, Ask), "requests that can still be in time do not wait behind it"
    assert admit(strict, answered(strict, ask, attained="a")) == "a"
    now_s = NOW_S + max_wait_s
    assert admit(decision, answered(decision, decision.tick(now_s), now_s, harmful="ab"), now_s) == "a"
    assert not decision.is_admitted


def test_a_late_request_waits_for_a_limited_time() -> None:
    """`MAX_LATE_S` from its deadline on at most, where the caller sets no limit and no other request waits."""
    core = deadline_core()
    decision, ask = late(core, SERVE_LATE)
    answered(decision, ask, harmful="ab")
    queue = core.queue("")
    assert queue is not None
    assert queue.deadline_s(decision.admission.number) == NOW_S + PLACING_S / 2 + MAX_LATE_S
    other, ask = place(core, when_late=SERVE_LATE, ttft_s=30.0)
    answered(other, ask, NOW_S, harmful="ab")
    ask = other.tick(NOW_S + 29.95)
    assert isinstance(answered(other, ask, NOW_S + 29.95, harmful="ab"), Wait)
    assert queue.deadline_s(other.admission.number) == NOW_S + 30.0 + MAX_LATE_S


def test_a_demoted_request_is_best_effort_without_deadlines() -> None:
    """From then on: in the order of the queue, in its limits, and in the request that drivers read."""
    core = deadline_core(admission_turn="deadline")
    decision, ask = late(core, DEMOTE)
    assert isinstance(answered(decision, ask, harmful="ab"), Wait)
    objective = decision.request.objective
    assert (objective.request_class, objective.slo, objective.when_late) == (BEST_EFFORT, Slo(), DEMOTE)
    assert (decision.request.indicators.due_s, decision.request.indicators.tpot_slo_s) == (math.inf, math.inf)
    queue = core.queue("")
    assert queue is not None
    assert (queue.lane_of(decision.admission.number), queue.num_best_effort) == (lane_of(math.inf, background=True), 1)
    ask = decision.tick(NOW_S + 1.0)
    assert admit(decision, answered(decision, ask, NOW_S + 1.0, harmful="a")) == "b"


def test_a_request_that_is_demoted_while_it_waits_has_no_deadline_in_its_new_lane() -> None:
    """A best-effort request that arrived before keeps its turn."""
    core = deadline_core(admission_turn="deadline", max_held_best_effort=2)
    first, ask = place_best_effort(core)
    answered(first, ask, harmful="ab")
    second, ask = place(core, when_late=DEMOTE)
    assert isinstance(answered(second, ask, harmful="ab"), Wait)
    queue = core.queue("")
    assert queue is not None
    assert queue.num_best_effort == 1
    ask = second.tick(NOW_S + 0.95)
    answered(second, ask, NOW_S + 0.95, harmful="ab")
    assert second.request.objective.is_best_effort
    assert queue.num_best_effort == 2
    assert queue.head(NOW_S + 0.95, lane_of(math.inf, background=True)) == first.admission.number


@pytest.mark.parametrize(("ttft_s", "queue_s", "least_s"), [(0.05, 2.0, 2.05), (0.01, 0.0, 0.1)])
def test_a_shed_request_may_come_back_when_it_would_be_in_time(ttft_s: float, queue_s: float, least_s: float) -> None:
    """After the time by which the best instance is late now, and a tenth of a second at least."""
    core = deadline_core()
    decision, ask = place(core, when_late=SHED, ttft_s=ttft_s)
    shed = answered(decision, ask, queue_s=queue_s)
    assert shed_because(shed) == LATE
    assert isinstance(shed, Shed)
    assert shed.retry_after_s == pytest.approx(least_s, abs=1e-9)


def test_a_shed_request_comes_back_behind_those_that_wait() -> None:
    """When their tokens have been admitted, at the rate of the last seconds."""
    core = deadline_core()
    for number in range(2001):  # 1000 tokens per second
        core.shares_of("").count(50.0, NOW_S - 100.0 + 0.05 * number, best_effort=False)
    for _ in range(50):  # 100 tokens each
        place(core, ttft_s=None) if core.num_waiting else answered(*place(core, ttft_s=60.0))
    decision, ask = late(core, SHED, tpot_s=0.01)
    shed = answered(decision, ask)
    assert isinstance(shed, Shed)
    assert shed.retry_after_s == pytest.approx(5.0, rel=0.05)


def test_best_effort_waits_while_others_would_miss_deadlines_everywhere() -> None:
    """It starts as soon as one instance can serve it without that."""
    core = deadline_core()
    decision, ask = place_best_effort(core)
    assert isinstance(answered(decision, ask, harmful="ab"), Wait)
    ask = decision.tick(NOW_S + 1.0)
    assert admit(decision, answered(decision, ask, NOW_S + 1.0, harmful="a")) == "b"
    assert decision.is_admitted


def test_best_effort_gets_its_share() -> None:
    """Below its share of the admitted tokens it starts on the best instance, although others may be late there."""
    core = deadline_core(best_effort_share=0.3)
    timely, ask = place(core)
    admit(timely, answered(timely, ask, attained="a"))
    decision, ask = place_best_effort(core)
    assert admit(decision, answered(decision, ask, harmful="ab")) == "a"
    assert not decision.is_admitted
    other, ask = place_best_effort(core, NOW_S + 1.0)
    assert isinstance(answered(other, ask, NOW_S + 1.0, harmful="ab"), Wait), "it has half of the tokens now"


def test_best_effort_is_shed_when_it_may_wait_no_longer() -> None:
    """It is not placed where others would miss deadlines."""
    core = deadline_core()
    decision, ask = place_best_effort(core, max_wait_s=2.0)
    answered(decision, ask, harmful="ab")
    ask = decision.tick(NOW_S + 2.0)
    assert shed_because(answered(decision, ask, NOW_S + 2.0, harmful="ab")) == TIMEOUT
    assert core.num_waiting == 0


@pytest.mark.parametrize(("when_late", "outcome"), [(SERVE_LATE, ""), (DEMOTE, ""), (SHED, TIMEOUT)])
def test_a_caller_that_leaves_soon_gets_an_answer_before_the_request_is_late(when_late: str, outcome: str) -> None:
    """The best instance, or a refusal."""
    core = deadline_core()
    decision, ask = place(core, when_late=when_late, max_wait_s=0.2)
    assert isinstance(answered(decision, ask), Wait)
    ask = decision.tick(NOW_S + 0.2)
    intention = answered(decision, ask, NOW_S + 0.2)
    if outcome:
        assert shed_because(intention) == outcome
    else:
        assert admit(decision, intention) == "a"


def test_a_tenant_has_only_so_many_waiting_requests() -> None:
    """Others of it are shed at once, those of other tenants are not."""
    core = deadline_core(max_held_of_tenant=1)
    answered(*place(core, client_id="x"))
    assert shed_because(place(core, client_id="x")[1]) == TENANT_LIMIT
    decision, ask = place(core, client_id="x", tpot_s=0.5)
    assert shed_because(answered(decision, ask)) == TENANT_LIMIT, "in another lane as well"
    decision, ask = place(core, NOW_S + 1.0, client_id="x", tpot_s=0.5)
    assert admit(decision, answered(decision, ask, NOW_S + 1.0, attained="a")) == "a", "it need not wait"
    assert isinstance(place(core, client_id="y")[1], Wait)
    assert core.num_waiting == 2


def test_best_effort_has_only_so_many_waiting_requests() -> None:
    """Real-time requests that are served late do not count."""
    core = deadline_core(max_held_best_effort=1)
    decision, ask = late(core, SERVE_LATE)
    answered(decision, ask, harmful="ab")
    assert isinstance(place_best_effort(core)[1], Wait), "behind it, in the same lane"
    assert shed_because(place_best_effort(core)[1]) == CLASS_LIMIT
    assert isinstance(answered(*place(core)), Wait)


def test_real_time_has_only_so_many_waiting_requests() -> None:
    """Best effort does not count; one that need not wait is placed."""
    core = deadline_core(max_held_real_time=1)
    answered(*place_best_effort(core), harmful="ab")
    assert isinstance(answered(*place(core)), Wait)
    assert shed_because(place(core)[1]) == CLASS_LIMIT, "behind it"
    decision, ask = place(core, tpot_s=0.5)
    assert shed_because(answered(decision, ask)) == CLASS_LIMIT, "in another lane as well"
    decision, ask = place(core, NOW_S + 1.0, tpot_s=0.5)
    assert admit(decision, answered(decision, ask, NOW_S + 1.0, attained="a")) == "a", "it need not wait"
    assert isinstance(place_best_effort(core)[1], Wait)


def test_a_demoted_request_does_not_wait_beyond_the_limit_of_best_effort() -> None:
    """It is refused as best effort would be."""
    core = deadline_core(max_held_best_effort=1)
    first, ask = place_best_effort(core)
    answered(first, ask, harmful="ab")
    second, ask = place(core, when_late=DEMOTE)
    answered(second, ask, harmful="ab")
    ask = second.tick(NOW_S + 0.95)
    assert shed_because(answered(second, ask, NOW_S + 0.95, harmful="ab")) == CLASS_LIMIT
    assert list(core.waiting) == [first.admission.number]


def test_a_full_queue_sheds_those_that_ask_for_it() -> None:
    """Others come in, and the oldest leaves."""
    core = deadline_core(max_held=1)
    first, ask = place(core)
    answered(first, ask)
    assert shed_because(place(core, when_late=SHED)[1]) == QUEUE_FULL
    assert isinstance(place(core)[1], Wait)
    assert list(core.ready) == [first]
    assert admit(first, answered(first, first.tick(NOW_S))) == "a"
    assert core.num_waiting == 1


def test_a_request_that_must_leave_a_full_queue_is_shed_if_it_asks_for_it() -> None:
    """It says that the queue is full."""
    core = deadline_core(max_held_tokens=250.0)
    oldest, ask = place(core, when_late=SHED)
    answered(oldest, ask)
    place(core)
    place(core)  # of 100 tokens each
    assert list(core.ready) == [oldest]
    assert shed_because(answered(oldest, oldest.tick(NOW_S))) == QUEUE_FULL
    assert core.num_waiting == 2


def test_where_too_many_tokens_wait_the_oldest_leave_one_after_the_other() -> None:
    """Also where it is not their turn."""
    core = deadline_core(max_held_tokens=250.0, admission_turn="deadline")
    first, ask = place(core, ttft_s=50.0)
    answered(first, ask)
    second, _ = place(core, ttft_s=51.0)
    urgent = core.decision(
        PlacementRequest(
            indicators=RequestIndicators(prompt_tokens=200, tag_tokens=50.0, due_s=NOW_S + 5.0, tpot_slo_s=0.05),
            arrived_s=NOW_S,
        )
    )
    urgent.start(NOW_S)
    for decision in (first, second):
        assert decision in core.ready
        admit(decision, answered(decision, decision.tick(NOW_S)))
    assert core.num_waiting == 1


def test_a_strict_request_does_not_wait_for_a_loose_one() -> None:
    """Each lane tries for itself; in each, requests wait for their turn."""
    core = deadline_core()
    loose, ask = place(core, tpot_s=0.5)
    answered(loose, ask)
    strict, ask = place(core, tpot_s=0.02)
    assert isinstance(ask, Ask)
    answered(strict, ask)
    assert isinstance(place(core, tpot_s=0.5)[1], Wait)
    ask = strict.tick(NOW_S + 0.2)
    admit(strict, answered(strict, ask, NOW_S + 0.2, attained="a"), NOW_S + 0.2)
    assert list(core.ready) == [loose]


def test_a_lane_that_a_request_leaves_goes_on() -> None:
    """The next one tries when the first one became late."""
    core = deadline_core()
    first, ask = place(core)
    answered(first, ask)
    second, wait = place(core, NOW_S + 0.5)
    assert isinstance(wait, Wait)
    ask = first.tick(NOW_S + 0.95)
    answered(first, ask, NOW_S + 0.95, harmful="ab")
    assert list(core.ready) == [second]


def test_a_dry_run_neither_waits_nor_is_shed() -> None:
    """It shows the best instance as things are."""
    core = deadline_core()
    decision, ask = place(core, when_late=SHED, ttft_s=0.01, dry_run=True)
    assert isinstance(answered(decision, ask, harmful="ab"), Placed)
    assert core.num_waiting == 0


def test_a_policy_without_deadlines_reads_none() -> None:
    """Late and best-effort requests are held, and placed, as all others are."""
    core = core_over("a", 'hold: hold = "predicted_queue_s < 1", hold_s = 5')
    for decision, ask in (place(core, when_late=SHED, ttft_s=0.01), place_best_effort(core)):
        intention = answered(decision, ask, queue_s=2.0) if isinstance(ask, Ask) else ask
        assert isinstance(intention, Wait)
        assert decision.request.indicators.due_s in (NOW_S + 0.01, math.inf)
        intention = answered(decision, decision.tick(NOW_S + 5.0), NOW_S + 5.0, attained="a")
        assert isinstance(intention, Reserve)


# Scripts.


def outcomes(script: Script) -> tuple[Record, ReferenceDriver]:
    """Run a script to its end."""
    record = Record()
    with recording(record):
        driver = ReferenceDriver(script)
        driver.run()
    return record, driver


def check_ends(script: Script, seen: Counter[str]) -> None:
    """Every decision ends once, and leaves nothing behind that it does not account for."""
    record, driver = outcomes(script)
    ends = [(name, kind) for name, kind, *_ in record.steps if kind in ("Placed", "Shed")]
    assert sorted(name for name, _ in ends) == sorted(f"r{number}" for number in range(len(script.arrivals)))
    assert (driver.core.num_waiting, driver.core.queue(""), list(driver.core.ready)) == (0, None, [])
    legs = {}
    for name, kind in ends:
        decision = record.decisions[name]
        asked = script.arrivals[int(name[1:])].objective
        if kind == "Placed":
            legs[int(name[1:])] = {leg.instance_id: leg.kind for leg in decision.placement.legs}
            is_best_effort = decision.request.objective.is_best_effort
            max_hold_s = MAX_BACKGROUND_WAIT_S if is_best_effort else (asked.slo.ttft_s or 0.0) + MAX_BACKGROUND_WAIT_S
            assert decision.placement.held_s <= max_hold_s + 1.0
        is_demoted = decision.request.objective != asked
        assert not is_demoted or (asked.when_late == DEMOTE and decision.request.objective.is_best_effort)
        seen[kind] += 1
        seen["demoted"] += is_demoted
        seen["deferred"] += decision.deadlines_dropped == DEFERRED
        seen["held"] += decision.admission is not None and decision.admission.joined_s > 0
    for name, sidecar in driver.sidecars.items():
        reserved = {number: kind for number, kinds in legs.items() for at, kind in kinds.items() if at == name}
        assert sidecar.reserved == reserved
    for step in record.steps:
        if step[1] == "Shed":
            seen[step[2]] += 1
            assert step[2] != "OverloadedError" or step[4] > 0


@pytest.mark.parametrize("roles", [False, True], ids=["", "roles"])
def test_every_decision_ends_and_leaves_nothing_behind(roles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In random scripts with lanes, limits and callers that leave, also with two legs, and with deferred requests."""
    seen = Counter[str]()
    numbers = count()
    monkeypatch.setattr(LateWork, "is_overload", lambda *_: True)
    monkeypatch.setattr(LateWork, "arrived", lambda *_, **__: next(numbers) % 2 == 0)  # each other one

    @examples(150)
    @given(promises(roles=roles, callers_leave=True))
    def check(script: Script) -> None:
        check_ends(script, seen)

    check()
    assert min(seen[kind] for kind in ("Placed", "Shed", "demoted", "held", "deferred", "OverloadedError")) >= 5, seen


@examples(100)
@given(promises())
def test_no_decision_waits_twice_for_the_same_moment(script: Script) -> None:
    """A wait that ends now is followed by an attempt, so that nothing spins."""
    driver = ReferenceDriver(script)
    ticks: dict[tuple[int, float], int] = Counter()
    original = Decision.tick

    def tick(decision: Decision, now_s: float) -> Intention:
        intention = original(decision, now_s)
        if isinstance(intention, Wait):
            assert intention.until_s > now_s or decision in driver.core.ready
        ticks[id(decision), now_s] += 1
        return intention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decision, "tick", tick)
        driver.run()
    assert max(ticks.values(), default=0) <= 2 * len(script.arrivals) + 2


def after_much_late_work(core: SchedulerCore) -> None:
    """Have a third of the work be late, of many short requests and some that take long."""
    core.late_work_of("").waits(NOW_S)
    for number in range(400):
        work_s = 5.0 if number % 10 == 0 else 0.5
        core.late_work_of("").arrived(
            lane_of(0.05, background=False), work_s, NOW_S - 4.0 + 0.01 * number, long=math.inf
        )
        if number % 3 == 0:
            core.late_work_of("").became_late(lane_of(0.05, background=False), work_s, NOW_S - 4.0 + 0.01 * number)


def work_core(policy: str = POLICY, **rules: Any) -> SchedulerCore:
    """A core over instances of which it is known how long they take for a prompt token."""
    core = deadline_core(policy=policy, **rules)
    for name in "ab":
        report(core, name, decode_step_s=0.01, prefill_token_s=0.001, num_running=1.0, least_tpot_slo_s=0.05)
    return core


def test_under_overload_a_request_that_takes_long_leaves_its_deadlines_at_once() -> None:
    """So that it keeps no others waiting; it still goes where no other misses one because of it."""
    core = work_core()
    after_much_late_work(core)
    decision, ask = place(core, prompt_tokens=20_000)
    assert decision.request.indicators.late == 1
    assert isinstance(answered(decision, ask, attained="ab", harmful="ab"), Wait)
    decision.cancel(NOW_S)
    short, ask = place(core, prompt_tokens=200)
    assert short.request.indicators.late == 0
    assert admit(short, answered(short, ask, attained="ab")) == "a"
    now_s = NOW_S + 1.0  # the instances may be asked again
    another, ask = place(core, now_s, prompt_tokens=20_000)
    assert admit(another, answered(another, ask, now_s, attained="ab"), now_s) == "a"
    assert (another.deadlines_dropped, short.deadlines_dropped) == (DEFERRED, "")
    assert why(another.placement, 2).endswith("deferred, as it takes long and others would be late")


@pytest.mark.parametrize(
    ("policy", "rules", "fields"),
    [
        (POLICY, {}, {"when_late": SHED}),  # a refusal is final
        (POLICY, {}, {"when_late": DEMOTE}),
        (POLICY, {}, {"ttft_s": None}),  # it is never late
        (POLICY, {}, {"weight": 100.0}),
        (POLICY, {}, {"excluded": "c"}),  # it was sent before
        (POLICY, {"admission_turn": "priority"}, {}),
        (POLICY, {}, {"now_s": NOW_S + OVERLOAD_S}),  # no other has had to wait since
        (f"{POLICY}, long = 0", {}, {}),
        ("polyserve", {}, {}),
    ],
)
def test_some_requests_keep_their_deadlines_however_long_they_take(
    policy: str, rules: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Those that would be refused or demoted, that are worth it, and those of policies and turns that defer none."""
    core = work_core(policy, **rules)
    after_much_late_work(core)
    decision, ask = place(core, fields.pop("now_s", NOW_S), prompt_tokens=20_000, **fields)
    assert decision.request.indicators.late == 0
    assert isinstance(ask, Ask)


def test_a_late_request_waits_longer_under_overload() -> None:
    """While others have to wait that can be in time; those whose targets nobody could keep are no overload."""
    core = deadline_core()
    for now_s, max_late_s in ((NOW_S, MAX_LATE_S), (NOW_S + 5.0, MAX_BACKGROUND_WAIT_S), (NOW_S + 50.0, MAX_LATE_S)):
        if max_late_s == MAX_BACKGROUND_WAIT_S:
            timely, ask = place(core, now_s - 1.0)
            assert isinstance(answered(timely, ask, now_s - 1.0, harmful="ab"), Wait)
            timely.cancel(now_s - 1.0)
        decision, ask = late_at(core, now_s)
        assert isinstance(answered(decision, ask, now_s, harmful="ab"), Wait)
        queue = core.queue("")
        assert queue is not None
        assert queue.deadline_s(decision.admission.number) == now_s + PLACING_S / 2 + max_late_s
        decision.cancel(now_s)
