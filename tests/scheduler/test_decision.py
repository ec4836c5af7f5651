"""Decisions on cases worked out by hand: what is asked, ranked, reserved, held, and how it is explained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.admission.queue import RETRY_S
from scheduler.candidate import CandidateStatus
from scheduler.candidates import RequestIndicators
from scheduler.comparison import Comparison
from scheduler.core import MAX_POLICIES, DecisionRules, SchedulerCore
from scheduler.decision import Decision
from scheduler.explanation import why
from scheduler.indicators import INDEX_OF
from scheduler.instance_table import InstanceTable
from scheduler.instances import InstanceDirectory, InstanceStatus, NoInstanceError, UnknownModelError
from scheduler.intentions import Answer, Ask, Intention, Placed, Reserve, Shed, Wait
from scheduler.placement import DecisionBasis, PlacementRequest
from scheduler.policies import POLICIES
from scheduler.policy import policy_from
from scheduler.prefix.prompt import PromptBlocks
from tests.fleets import random_fleet
from tests.scheduler.scripted import EPOCH, forecast_of

FORECAST, LATE, DOWN, INVALID, REFUSED, STOPPED, DRAINING = (
    CandidateStatus.FORECAST,
    CandidateStatus.LATE,
    CandidateStatus.DOWN,
    CandidateStatus.INVALID,
    CandidateStatus.REFUSED,
    CandidateStatus.STOPPED,
    CandidateStatus.DRAINING,
)
HOLD = 'hold: hold = "predicted_queue_s < 1", hold_s = 5'


def core_over(
    instances: str | Mapping[str, float],
    policy: str = "block",
    *,
    models: Mapping[str, str] | None = None,
    **rules: Any,
) -> SchedulerCore:
    """A core over instances, that runs so many requests each."""
    directory = InstanceDirectory()
    directory.update(
        InstanceStatus(instance_id=name, models=tuple(models[name]) if models else ()) for name in instances
    )
    core = SchedulerCore(policy, directory, random=lambda: 0.5, rules=DecisionRules(**rules), seed=1)
    if isinstance(instances, Mapping):
        for name, num_running in instances.items():
            report(core, name, num_running=num_running)
    return core


def report(core: SchedulerCore, name: str, now_s: float = 0.0, **values: float) -> None:
    """Have an instance report."""
    status = core.instances.by_id[name]
    status.indicators = {"num_running": 0.0, "num_waiting": 0.0, **values}
    status.reported_s = now_s
    core.instances.table.replace(name, status.indicators, now_s)


def answer(given: float | CandidateStatus | Answer, version: int = 0) -> Answer:
    """An answer with a forecast of this time, or a failure."""
    if isinstance(given, Answer):
        return given
    if isinstance(given, CandidateStatus):
        return Answer(given, note=f"is {given.value}")
    return Answer(FORECAST, forecast_of(given), version, EPOCH)


def started(core: SchedulerCore, now_s: float = 0.0, **request: Any) -> tuple[Decision, Intention]:
    """Start a decision."""
    decision = core.decision(PlacementRequest(**{"request_id": "r", "arrived_s": now_s, **request}))
    return decision, decision.start(now_s)


def answered(
    core: SchedulerCore, answers: Mapping[str, float | CandidateStatus | Answer], now_s: float = 0.0, **request: Any
) -> tuple[Decision, Intention]:
    """Start a decision, and have it answered by all that it asks."""
    decision, intention = started(core, now_s, **request)
    assert isinstance(intention, Ask), intention
    return decision, decision.answers(replies(intention, answers), now_s)


def replies(ask: Ask, answers: Mapping[str, float | CandidateStatus | Answer]) -> dict[str, Answer]:
    """The answers to a question, of all that were asked."""
    return {name: answer(answers[name]) for name in ask.instance_ids if name in answers}


def ranked(core: SchedulerCore, answers: Mapping[str, float | CandidateStatus | Answer]) -> str:
    """The ranking of a decision as one word."""
    return "".join(answered(core, answers)[0].explanation.ranking())


def placed_at(intention: Intention) -> str:
    """Where a request is placed."""
    assert isinstance(intention, Placed), intention
    return intention.decision.placement.instance_id


def reserve_at(intention: Intention) -> str:
    """Where a request is to be reserved."""
    assert isinstance(intention, Reserve), intention
    return intention.instance_id


# Ranking.


def test_the_lowest_score_wins_and_is_reserved_on_the_condition_that_nothing_changed() -> None:
    """Scores are noted, ties go by id, whatever the order in which instances answered."""
    core = core_over("abc")
    decision, intention = answered(core, {"b": 2.0, "c": answer(1.0, version=4), "a": 2.0})
    assert intention == Reserve("c", 2, 4, EPOCH, forecast_of(1.0))
    assert decision.explanation.ranking() == ["c", "a", "b"]
    assert [one.score for one in decision.explanation.candidates()] == [2.0, 2.0, 1.0]
    assert decision.reserved(10.0, 101.0).decision is decision
    placement = decision.placement
    assert (placement.instance_id, placement.basis, placement.reserved_for_s) == ("c", DecisionBasis.FORECAST, 10.0)
    assert placement.next_best == ["a", "b"]
    assert why(placement, 3) == "block over 3: e2e 1.000 s, ttft 0.100 s; next a: e2e 2.000 s"


def test_reservations_made_since_a_forecast_count() -> None:
    """Each costs a prefill, here 0.1 s; the reservation is conditional on the count with them."""
    core = core_over("abc")
    for name, num in (("a", 2), ("b", 1)):
        core.instances.by_id[name].versions.report(num, EPOCH)
    decision, intention = answered(core, {"a": 2.0, "b": 2.0, "c": 2.15})
    assert decision.explanation.ranking() == ["b", "c", "a"]
    assert isinstance(intention, Reserve)
    assert (intention.instance_id, intention.if_version) == ("b", 1)
    assert intention.forecast is not None
    assert intention.forecast.e2e_s == pytest.approx(2.1)
    decision.reserved(10.0, 101.0)
    assert decision.placement.forecast == intention.forecast


def test_reservations_of_another_epoch_do_not_count() -> None:
    """The sidecar restarted: what it reported before is void."""
    core = core_over("ab")
    core.instances.by_id["a"].versions.report(9, EPOCH - 1)
    assert ranked(core, {"a": 2.0, "b": 2.05}) == "ab"


def test_instances_without_a_forecast_come_after_those_with_one() -> None:
    """Late ones first, then those that are down, then draining ones; those where it would never finish come last."""
    core = core_over({"a": 9.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0})
    core.instances.by_id["c"].is_draining = True
    core.instances.suspect("c")
    assert ranked(core, {"a": LATE, "b": DOWN, "d": 5.0, "e": math.inf}) == "dabce"


def test_a_missing_answer_is_a_late_one() -> None:
    """The driver leaves out what did not answer by its deadline."""
    decision, intention = answered(core_over("ab"), {"b": 9.0})
    assert reserve_at(intention) == "b"
    assert [(one.instance_id, one.status) for one in decision.explanation.skipped()] == [("a", LATE)]
    assert len(decision.explanation.skipped()) == 1


def test_where_it_would_never_finish_comes_after_every_fallback() -> None:
    """A late instance is tried first; without one, the request goes where it may finish after all."""
    core = core_over("ab")
    _, intention = answered(core, {"a": math.inf, "b": LATE})
    assert placed_at(intention) == "b"
    _, intention = answered(core, {"a": math.inf, "b": math.inf})
    assert reserve_at(intention) == "a"


def test_a_forecast_of_which_a_part_is_missing_comes_after_whole_ones() -> None:
    """A policy over delays cannot compare instances that did not report them; delays are asked for."""
    core = core_over("ab", "marginal")
    _, intention = started(core)
    assert isinstance(intention, Ask)
    assert intention.with_delays
    whole = answer(9.0)._replace(forecast=replace(forecast_of(9.0), delay_sum_s=1.0))
    assert ranked(core, {"a": 1.0, "b": whole}) == "ba"


def test_an_engine_that_failed_recently_comes_last_whatever_its_forecast() -> None:
    """A dead engine looks idle to its sidecar; it is asked, and used only where there is no other."""
    core = core_over("ab")
    for _ in range(2):
        core.instances.engine_failed("a", 0.0)
    decision, intention = started(core)
    assert isinstance(intention, Ask)
    assert (intention.candidates.instance_ids, intention.others) == (("b",), ["a"])
    assert intention.instance_ids == ("b", "a")
    decision.answers({"a": answer(1.0), "b": answer(9.0)}, 0.0)
    assert decision.explanation.ranking() == ["b", "a"]
    decision, intention = answered(core, {"a": answer(1.0, version=3), "b": REFUSED})
    assert intention == Reserve("a", 0, 3, EPOCH, None)
    decision.reserved(10.0, 101.0)
    assert decision.placement.basis is DecisionBasis.LAST_RESORT
    assert decision.placement.forecast is None
    assert why(decision.placement, 2).startswith(
        "no instance could be compared: its engine failed recently, circuit open"
    )


def test_a_conflict_at_an_engine_that_failed_is_counted_from_the_new_forecast() -> None:
    """Reservations that were in flight when it answered are part of the new count, and are not added to it again."""
    core = core_over("a")
    for _ in range(2):
        core.instances.engine_failed("a", 0.0)
    versions = core.instances.by_id["a"].versions
    versions.report(3, EPOCH)
    with versions.claimed(3):
        decision, intention = answered(core, {"a": answer(1.0, version=3)})
    assert isinstance(intention, Reserve)
    assert intention.if_version == 4
    versions.report(5, EPOCH)
    again = decision.conflict(answer(1.5, version=5), 0.0)
    assert isinstance(again, Reserve)
    assert again.if_version == 5


# Shortlists.


def test_left_out_instances_are_neither_asked_nor_ranked_while_others_can_serve() -> None:
    """The explanation names them, with the reason."""
    core = core_over({"a": 9.0, "b": 1.0, "c": 5.0}, "block: k = 1, shortlist = 'jsq'")
    decision, intention = answered(core, {"b": 3.0})
    assert reserve_at(intention) == "b"
    assert decision.explanation.ranking() == ["b"]
    assert [(one.instance_id, one.status.value, one.note) for one in decision.explanation.candidates()] == [
        ("a", "not_shortlisted", "is not on the shortlist"),
        ("b", "forecast", ""),
        ("c", "not_shortlisted", "is not on the shortlist"),
    ]
    assert len(decision.explanation.skipped()) == 0


def test_left_out_instances_are_tried_before_those_that_failed() -> None:
    """As far as is known they are healthy; the least busy first, with a reservation, and on no condition."""
    core = core_over({"a": 9.0, "b": 1.0, "c": 0.0}, "block: k = 1, shortlist = 'jsq'")
    decision, intention = answered(core, {"c": LATE})
    assert intention == Reserve("b", 1, None, None, None)
    assert decision.explanation.ranking() == ["b", "a", "c"]
    decision.reserved(10.0, 101.0)
    assert (decision.placement.basis, decision.placement.forecast) == (DecisionBasis.LAST_RESORT, None)
    assert why(decision.placement, 3) == "no instance could be compared: is not on the shortlist; without c: is late"


def test_a_left_out_instance_that_fails_gives_way_to_the_next() -> None:
    """Until none is left that may work."""
    core = core_over({"a": 9.0, "b": 1.0, "c": 0.0}, "block: k = 1, shortlist = 'jsq'")
    decision, _ = answered(core, {"c": DOWN})
    assert reserve_at(decision.reservation_failed(REFUSED, "prompt_tokens: too many", 0.0)) == "a"
    assert placed_at(decision.reservation_failed(DOWN, "gone", 0.0)) == "c"


# Indicators.


def test_what_was_ranked_once_is_not_ranked_again() -> None:
    """A policy that remembers scores once per request; an instance that fails drops out, the others keep their order."""
    core = core_over("abc", "round_robin")
    decision, intention = started(core)
    assert reserve_at(intention) == "a"
    assert intention == Reserve("a", 0, None, None, None)
    assert reserve_at(decision.reservation_failed(DOWN, "gone", 0.0)) == "b"
    assert decision.explanation.ranking() == ["b", "c", "a"]
    decision.reserved(10.0, 101.0)
    assert decision.placement.basis is DecisionBasis.BLIND
    assert why(decision.placement, 3) == "round_robin over 2; without a: when reserving: gone"
    assert reserve_at(started(core)[1]) == "b"


def test_the_order_among_all_is_that_of_their_scores() -> None:
    """An unknown score comes last."""
    core = core_over(dict(zip("abdef", (0.0, 1.0, 3.0, 2.0, 5.0), strict=True)) | {"c": 0.0}, "expr: num_running")
    core.instances.table.known.reported[INDEX_OF["num_running"], 2] = math.nan
    decision, intention = started(core)
    order = [reserve_at(intention)]
    while not isinstance(intention := decision.reservation_failed(REFUSED, "no", 0.0), Shed):
        order.append(reserve_at(intention))
    assert "".join(order) == "abedfc"


def test_the_explanation_keeps_what_was_seen_whatever_is_reported_later() -> None:
    """Scores, indicators, their age, and the order among equals."""
    core = core_over(dict(zip("abcdef", range(6), strict=True)), "jsq: tie_break = 'num_total_blocks'")
    for name, num_blocks in zip("abcdef", (5.0, 4.0, 3.0, 2.0, 1.0, 0.0), strict=True):
        report(core, name, 10.0, num_running=5.0, num_total_blocks=num_blocks)
    decision, intention = started(core, 12.0)
    assert reserve_at(intention) == "f"
    report(core, "f", 13.0, num_running=99.0, num_total_blocks=7.0)
    report(core, "a", 13.0, num_running=5.0, num_total_blocks=-1.0)
    assert decision.explanation.ranking() == list("fedcba")
    seen = {one.instance_id: one for one in decision.explanation.candidates()}
    assert list(seen) == list("abcdef")
    assert (seen["f"].score, seen["f"].read["num_running"], seen["f"].age_s) == (5.0, 5.0, 2.0)
    assert seen["f"].indicators["num_running"] == 5.0
    assert {one.status for one in seen.values()} == {CandidateStatus.INDICATORS}


def test_a_failed_reservation_falls_back_by_the_order_of_the_decision() -> None:
    """Also where reports that came while reserving would rank equals otherwise."""
    core = core_over("abc", "jsq: tie_break = 'num_total_blocks'")
    for name, num_blocks in zip("abc", (1.0, 2.0, 3.0), strict=True):
        report(core, name, num_total_blocks=num_blocks)
    decision, intention = started(core)
    assert reserve_at(intention) == "a"
    report(core, "c", num_total_blocks=0.0)
    assert reserve_at(decision.reservation_failed(DOWN, "gone", 0.0)) == "b"


def test_candidates_of_which_nothing_is_known_have_no_age() -> None:
    """Their score is unknown; a policy that reads nothing has asked none."""
    decision, _ = started(core_over("ab", "jsq"), 5.0)
    first = decision.explanation.candidates()[0]
    assert first.score is not None
    assert math.isnan(first.score)
    assert (first.status, first.age_s) == (CandidateStatus.INDICATORS, 0.0)
    decision, _ = started(core_over("ab", "round_robin"), 5.0)
    first = decision.explanation.candidates()[0]
    assert (first.status, first.age_s, first.read) == (CandidateStatus.NOT_QUERIED, 0.0, {})


def test_instances_that_were_not_compared_are_explained_with_the_age_at_the_decision() -> None:
    """Left out, unhealthy or late: how old their indicators were then."""
    core = core_over("abc", "block: k = 2, shortlist = 'jsq'")
    for name in "abcd"[:3]:
        report(core, name, 90.0, num_running=float(ord(name)))
    core.instances.by_id["c"].age_s = 0.5
    decision, _ = answered(core, {"a": 1.0, "b": LATE}, now_s=100.0)
    ages = {one.instance_id: one.age_s for one in decision.explanation.candidates()}
    assert (ages["b"], ages["c"]) == (10.0, 10.5)


# Reservations.


def test_a_conflict_ranks_anew_by_the_forecast_that_comes_with_it() -> None:
    """The instance may still be the best; its delays are those of the forecast before."""
    core = core_over("ab", "marginal: lambda = 1")
    delays = {"delay_sum_s": 1.0, "delay_worst_s": 0.5, "others_preempted": 2}
    first = Answer(FORECAST, replace(forecast_of(2.0), **delays), 4, EPOCH)
    second = Answer(FORECAST, replace(forecast_of(2.5), **delays), 1, EPOCH)
    decision, intention = answered(core, {"a": first, "b": second})
    assert reserve_at(intention) == "a"
    intention = decision.conflict(Answer(FORECAST, forecast_of(2.2), 5, EPOCH), 0.0)
    assert isinstance(intention, Reserve)
    assert (intention.instance_id, intention.if_version) == ("a", 5)
    assert intention.forecast == replace(forecast_of(2.2), **delays)
    intention = decision.conflict(Answer(FORECAST, forecast_of(2.6), 6, EPOCH), 0.0)
    assert isinstance(intention, Reserve)
    assert (intention.instance_id, intention.if_version) == ("b", 1)
    decision.reserved(10.0, 101.0)
    assert why(decision.placement, 2).endswith(", after 2 conflicts")


def test_a_conflict_ranks_anew_with_the_reservations_made_meanwhile() -> None:
    """Also those at the other instances."""
    core = core_over("abc")
    decision, _ = answered(core, {"a": 2.0, "b": 2.05, "c": 2.1})
    core.instances.by_id["b"].versions.report(1, EPOCH)
    assert reserve_at(decision.conflict(answer(2.5, version=1), 0.0)) == "c"


def test_after_too_many_conflicts_the_reservation_is_unconditional() -> None:
    """Somebody else may come first for ever."""
    decision, intention = answered(core_over("a", max_conflicts=2), {"a": 2.0})
    conditions = []
    for version in (1, 2, 3):
        assert isinstance(intention, Reserve)
        conditions.append(intention.if_version)
        intention = decision.conflict(answer(2.0, version=version), 0.0)
    assert conditions == [0, 1, None]


def test_a_conflict_without_a_usable_forecast_is_a_failure_of_the_instance() -> None:
    """The next best one is tried."""
    decision, _ = answered(core_over("ab"), {"a": 1.0, "b": 2.0})
    assert reserve_at(decision.conflict(Answer(REFUSED, note="prompt_tokens: too many"), 0.0)) == "b"
    (skipped,) = decision.explanation.skipped()
    assert (skipped.status, skipped.note, skipped.score) == (REFUSED, "when reserving: prompt_tokens: too many", 1.0)


def test_after_too_many_failed_reservations_a_request_goes_without_one() -> None:
    """To the best instance that is left; refusals are no failures."""
    core = core_over("abcd")
    answers = dict(zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True))
    decision, _ = answered(core, answers)
    assert reserve_at(decision.reservation_failed(LATE, "late", 0.0)) == "b"
    assert placed_at(decision.reservation_failed(DOWN, "gone", 0.0)) == "c"
    assert (decision.placement.reserved_for_s, decision.placement.basis) == (None, DecisionBasis.FORECAST)
    decision, _ = answered(core, answers)
    assert reserve_at(decision.reservation_failed(REFUSED, "full", 0.0)) == "b"
    assert reserve_at(decision.reservation_failed(STOPPED, "is down", 0.0, counts=False)) == "c"
    assert reserve_at(decision.reservation_failed(DOWN, "gone", 0.0)) == "d"
    decision, _ = answered(core_over("abc", max_failed_reservations=0), answers | {"a": 9.0})
    assert decision.placement.instance_id == "b"


def test_a_late_instance_is_the_last_resort_and_gets_no_reservation() -> None:
    """It is unknown whether it could reserve anything."""
    decision, intention = answered(core_over({"a": 3.0, "b": 1.0}), {"a": LATE, "b": LATE})
    assert placed_at(intention) == "b"
    assert decision.placement.reserved_for_s is None
    assert why(decision.placement, 2) == ("no instance could be compared: is late; without a: is late; b: is late")


def test_an_instance_that_was_removed_meanwhile_is_no_error() -> None:
    """Its answer is compared; the reservation fails, and the next best one is tried."""
    core = core_over("abc")
    core.instances.suspect("b")
    decision, ask = started(core)
    assert isinstance(ask, Ask)
    core.instances.update([core.instances.by_id["b"], core.instances.by_id["c"]])
    core.instances.suspect("b")
    assert reserve_at(decision.answers(replies(ask, {"a": 1.0, "b": 2.0, "c": 3.0}), 0.0)) == "a"
    assert reserve_at(decision.reservation_failed(DOWN, "instance was removed from the list", 0.0)) == "b"


def test_a_fallback_that_was_removed_meanwhile_is_no_error() -> None:
    """An engine that failed is reserved at last, when the list of instances is another one."""
    core = core_over("ab")
    for name in "aabb":
        core.instances.engine_failed(name, 0.0)
    decision, intention = answered(core, {"a": 1.0, "b": 1.0})
    assert reserve_at(intention) == "a"
    core.instances.update([core.instances.by_id["a"]])
    assert reserve_at(decision.reservation_failed(REFUSED, "full", 0.0)) == "b"


# Requests that cannot be placed, or are not to be.


def test_a_request_that_all_instances_refuse_is_at_fault_itself() -> None:
    """Excluded instances do not change that; one that is down does."""
    core = core_over("abc")
    refusal = Answer(REFUSED, note="prompt_tokens: too many")
    _, intention = answered(core, {"a": refusal, "b": refusal}, excluded={"c"})
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, ValueError)
    assert str(intention.error) == "request.prompt_tokens: too many"
    decision, intention = answered(core, {"a": refusal, "b": STOPPED, "c": 1.0})
    intention = decision.reservation_failed(REFUSED, "prompt_tokens: too many", 0.0)
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, NoInstanceError)
    assert "b: is stopped" in str(intention.error)


@pytest.mark.parametrize("status", [REFUSED, STOPPED])
def test_an_instance_that_cannot_serve_is_not_ranked(status: CandidateStatus) -> None:
    """Not even where there is no other."""
    decision, intention = answered(core_over("a"), {"a": status})
    assert isinstance(intention, Shed)
    assert decision.explanation.ranking() == []


def test_excluded_instances_are_not_asked() -> None:
    """And are no last resort; names of unknown instances are ignored."""
    core = core_over("ab")
    decision, intention = answered(core, {"b": 9.0}, excluded={"a", "unknown"})
    assert reserve_at(intention) == "b"
    decision.reserved(10.0, 101.0)
    assert why(decision.placement, 2).endswith("without a: excluded by the caller")
    _, intention = started(core, excluded={"a", "b"})
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, NoInstanceError)


def test_a_dry_run_reserves_nothing_and_waits_for_nothing() -> None:
    """It shows where the request would go, whether or not that instance admits it."""
    core = core_over("ab")
    decision, intention = answered(core, {"a": 3.0, "b": 2.0}, dry_run=True)
    assert placed_at(intention) == "b"
    assert decision.placement.reserved_for_s is None
    _, intention = answered(core, {"a": LATE, "b": LATE}, dry_run=True)
    assert placed_at(intention) == "a"
    core = core_over("a", HOLD)
    queue = Answer(FORECAST, forecast_of(9.0, queue_s=5.0), 0, EPOCH)
    assert isinstance(answered(core, {"a": queue})[1], Wait)
    decision, intention = answered(core, {"a": queue}, dry_run=True)
    assert placed_at(intention) == "a"
    assert not decision.is_admitted
    assert core.num_waiting == 1


def test_only_instances_that_serve_the_model_are_asked() -> None:
    """An unknown model is refused; without instances there is no such model to speak of."""
    core = core_over("abc", models={"a": "m", "b": "n", "c": "mn"})
    decision, intention = started(core, model="n")
    assert isinstance(intention, Ask)
    assert intention.instance_ids == ("b", "c")
    assert decision.answers(replies(intention, {"b": 2.0, "c": 1.0}), 0.0) == Reserve(
        "c", 2, 0, EPOCH, forecast_of(1.0)
    )
    _, intention = started(core, model="o")
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, UnknownModelError)
    _, intention = started(core)
    assert isinstance(intention, Shed)
    assert "request.model: is missing; there are m, n" in str(intention.error)
    _, intention = started(core_over(""))
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, NoInstanceError)


@pytest.mark.parametrize("name", POLICIES)
def test_where_none_is_healthy_the_fallback_needs_no_policy(name: str) -> None:
    """All are late, down or draining: those that may work come first, the less busy ones of them; none is scored."""
    core = core_over(dict(zip("abcde", (0.0, 0.0, 9.0, 4.0, 0.0), strict=True)), name)
    statuses = {"a": DRAINING, "b": DOWN, "c": LATE, "d": LATE, "e": STOPPED}
    instances = core.instances.by_id
    if core.policy.needs_forecast:
        instances["a"].is_draining = True
        core.instances.suspect("a")
        decision, intention = answered(core, statuses)
        assert "".join(decision.explanation.ranking()) == "dcba"
        # one that the policy left out before any was asked may be able to reserve
        assert (intention.instance_id if isinstance(intention, Reserve) else placed_at(intention)) == "d"
    else:
        instances["a"].is_draining, instances["e"].reported_state = True, "down"
        for instance in "bcd":
            instances[instance].sidecar.num_failures = 2
        for instance in "abcde":
            core.instances.suspect(instance)
        decision, intention = started(core)
        assert "".join(decision.explanation.ranking()) == "bdca"
        assert placed_at(intention) == "b"
    assert all(one.score is None for one in decision.explanation.candidates())
    assert isinstance(started(core_over("", name))[1], Shed)


# Forecasts that the policy does not need.


def test_the_chosen_instance_forecasts_where_that_is_wanted_always() -> None:
    """The forecast is recorded with the reservation, which it does not make conditional."""
    core = core_over({"a": 3.0, "b": 1.0}, "jsq", forecast_always=True)
    decision, intention = started(core)
    assert isinstance(intention, Ask)
    assert (intention.instance_ids, intention.with_delays) == (("b",), False)
    intention = decision.answers({"b": answer(2.0, version=3)}, 0.0)
    assert intention == Reserve("b", 1, None, None, forecast_of(2.0))
    decision.reserved(10.0, 101.0)
    assert decision.placement.forecast == forecast_of(2.0)
    assert decision.placement.basis is DecisionBasis.INDICATORS
    assert why(decision.placement, 2) == "jsq over 2: e2e 2.000 s, ttft 0.100 s"


def test_a_forecast_that_no_policy_needs_may_fail() -> None:
    """The request is reserved without one; if that fails too, the next instance is asked."""
    core = core_over({"a": 3.0, "b": 1.0}, "jsq", forecast_always=True)
    decision, _ = started(core)
    assert decision.answers({}, 0.0) == Reserve("b", 1, None, None, None)
    intention = decision.reservation_failed(DOWN, "gone", 0.0)
    assert isinstance(intention, Ask)
    assert intention.instance_ids == ("a",)
    decision, intention = started(core_over("a", "jsq", forecast_always=True), dry_run=True)
    assert placed_at(intention) == "a"


# The admission queue.

QUEUED = Answer(FORECAST, forecast_of(9.0, queue_s=5.0), 0, EPOCH)
FREE = Answer(FORECAST, forecast_of(9.0), 0, EPOCH)


def held(core: SchedulerCore, now_s: float = 0.0, **request: Any) -> tuple[Decision, Wait]:
    """A decision that waits."""
    decision, intention = started(core, now_s, **request)
    if isinstance(intention, Ask):
        intention = decision.answers(dict.fromkeys(intention.instance_ids, QUEUED), now_s)
    assert isinstance(intention, Wait), intention
    return decision, intention


def test_a_request_that_no_instance_admits_waits_for_the_next_attempt() -> None:
    """The head of the queue tries again after a pause; all attempts see the current instances."""
    core = core_over("a", HOLD)
    decision, wait = held(core, 100.0)
    assert wait == Wait(100.0 + RETRY_S)
    assert (core.num_waiting, decision.is_waiting) == (1, True)
    assert decision.tick(100.01) == wait
    ask = decision.tick(100.06)
    assert isinstance(ask, Wait), "the instance refused 0.06 s ago"
    ask = decision.tick(100.2)
    assert isinstance(ask, Ask)
    assert not decision.is_waiting
    intention = decision.answers({"a": FREE}, 100.21)
    assert reserve_at(intention) == "a"
    decision.reserved(10.0, 101.0)
    assert core.num_waiting == 0
    assert core.queue("") is None
    assert decision.placement.held_s == pytest.approx(0.2)
    times = "e2e 9.000 s, ttft 0.100 s; held 0.200 s"
    assert why(decision.placement, 1) == f"{HOLD} over 1: {times}"


def test_an_instance_that_refused_the_last_request_is_asked_about_one_whose_prefix_it_has() -> None:
    """There it may start at once; with a fifth of its prompt or less it waits as the last one did."""
    core = core_over("abc", f"{HOLD}, tie_break = 'prefix_hit_tokens'")
    decision, _ = held(core, 100.0)
    decision.cancel(100.01)
    indicators = RequestIndicators(prompt_tokens=1000)
    few, many = np.array([0.0, 0.0, 200.0]), np.array([0.0, 0.0, 201.0])
    decision, intention = started(core, 100.02, indicators=indicators, prefix_hits=few)
    assert isinstance(intention, Wait)
    decision.cancel(100.03)
    _, intention = started(core, 100.04, indicators=indicators, prefix_hits=many)
    assert isinstance(intention, Ask)
    assert intention.instance_ids == ("c",)


def test_an_instance_where_a_request_finished_is_asked_at_the_next_attempt() -> None:
    """Sooner than one where nothing changed."""
    core = core_over("ab", HOLD)
    for name in "ab":
        report(core, name, num_finished_total=3.0)
    decision, wait = held(core, 100.0)
    report(core, "b", 100.01, num_finished_total=4.0)
    ask = decision.tick(wait.until_s)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("b",)


def test_only_the_head_of_the_queue_tries() -> None:
    """Others wait for their turn, until their deadline; each end makes the next one ready."""
    core = core_over("a", HOLD)
    first, _ = held(core, 100.0)
    second, wait = held(core, 101.0)
    third, _ = held(core, 102.0)
    assert wait == Wait(106.0)
    assert isinstance(second.tick(101.5), Wait)
    assert not core.ready
    ask = first.tick(102.5)
    assert isinstance(ask, Ask)
    first.answers({"a": FREE}, 102.5)
    assert not core.ready
    first.reserved(10.0, 101.0)
    assert list(core.ready) == [second]
    assert core.ready.popleft().wait_until_s == -math.inf
    ask = second.tick(102.5)
    assert isinstance(ask, Ask)
    assert isinstance(second.answers({"a": QUEUED}, 102.5), Wait)
    second.cancel(102.6)
    assert list(core.ready) == [third]
    assert (core.num_waiting, second.is_waiting) == (1, False)
    third.cancel(102.6)
    assert core.queue("") is None
    third.cancel(102.7)


def test_a_request_joins_behind_others_without_asking() -> None:
    """First come, first served; requests of other models and dry runs do not wait behind it."""
    core = core_over("ab", HOLD, models={"a": "m", "b": "n"})
    held(core, model="m")
    _, intention = started(core, model="m")
    assert isinstance(intention, Wait)
    assert isinstance(started(core, model="n")[1], Ask)
    assert isinstance(started(core, model="m", dry_run=True)[1], Ask)
    assert core.num_waiting == 2


@pytest.mark.parametrize(
    ("request_fields", "deadline_s"),
    [({}, 105.0), ({"waited_s": 3.0}, 102.0), ({"max_wait_s": 1.5}, 101.5), ({"waited_s": 9.0}, 96.0)],
)
def test_no_request_waits_beyond_its_deadline(request_fields: dict[str, float], deadline_s: float) -> None:
    """By the policy's limit, less what it waited before, and by the caller's; then the best instance gets it."""
    core = core_over("ab", HOLD)
    held(core, 99.0)
    decision, wait = held(core, 100.0, **request_fields)
    assert wait.until_s == deadline_s
    ask = decision.tick(max(100.5, deadline_s))
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a", "b"), "all are asked, whether or not they refused just now"
    intention = decision.answers({"a": QUEUED, "b": QUEUED}, 105.1)
    assert reserve_at(intention) == "a"
    decision.reserved(10.0, 101.0)
    assert not decision.is_admitted
    assert why(decision.placement, 2).endswith("s, not admitted by any instance")


def test_the_head_does_not_pause_beyond_its_deadline() -> None:
    """The pause before its next attempt ends there."""
    _, wait = held(core_over("a", HOLD), 100.0, max_wait_s=0.01)
    assert wait == Wait(100.01)


def test_when_too_many_wait_the_oldest_leaves() -> None:
    """It goes to the best instance, admitted or not; no request is refused."""
    core = core_over("a", HOLD, max_held=2)
    first, _ = held(core, 100.0)
    second, _ = held(core, 100.0)
    assert not core.ready
    held(core, 100.0)
    assert list(core.ready) == [first]
    core.ready.clear()
    ask = first.tick(100.0)
    assert isinstance(ask, Ask)
    assert reserve_at(first.answers({"a": QUEUED}, 100.0)) == "a"
    first.reserved(10.0, 101.0)
    assert list(core.ready) == [second]
    core.ready.clear()
    assert isinstance(second.tick(100.0), Wait)


def test_a_decision_is_made_ready_once() -> None:
    """And not at all while an attempt is under way."""
    core = core_over("a", HOLD)
    decision, _ = held(core)
    assert decision.wake()
    assert not decision.wake()
    decision.tick(1.0)
    assert not decision.is_waiting
    assert not decision.wake()
    other, _ = started(core_over("a"))
    assert not other.wake()


def test_another_order_makes_another_request_the_head() -> None:
    """A decision whose turn it is not any more makes the new head ready."""
    core = core_over("a", HOLD)
    core = SchedulerCore(
        HOLD, core.instances, random=lambda: 0.5, order=lambda numbers, now_s: numbers if now_s < 101 else numbers[::-1]
    )
    first, _ = held(core, 100.0)
    second, _ = held(core, 100.0)
    assert first.tick(101.0) == Wait(105.0)
    assert list(core.ready) == [second]
    assert isinstance(second.tick(101.0), Ask)


def test_instances_that_come_or_go_while_asking_do_not_matter_to_refusals() -> None:
    """Refusals are noted by row, and rows are others then; all are worth asking again."""
    core = core_over("abc", HOLD)
    decision, ask = started(core)
    assert isinstance(ask, Ask)
    core.instances.update([core.instances.by_id["a"]])
    assert isinstance(decision.answers(replies(ask, dict.fromkeys("abc", QUEUED)), 0.0), Wait)
    ask = decision.tick(1.0)
    assert isinstance(ask, Ask)
    assert ask.instance_ids == ("a",)


def test_a_late_instance_is_no_reason_to_wait() -> None:
    """A condition that could not be checked holds no request back."""
    core = core_over("a", HOLD)
    _, intention = answered(core, {"a": LATE})
    assert placed_at(intention) == "a"
    assert core.num_waiting == 0


def test_a_waiting_request_of_a_model_that_is_gone_is_shed() -> None:
    """It leaves the queue, and the next one is ready."""
    core = core_over("ab", HOLD, models={"a": "m", "b": "n"})
    first, _ = held(core, model="m")
    second, _ = held(core, model="m")
    core.instances.update([core.instances.by_id["b"]])
    intention = first.tick(1.0)
    assert isinstance(intention, Shed)
    assert isinstance(intention.error, UnknownModelError)
    assert list(core.ready) == [second]
    assert core.num_waiting == 1


# What decisions share.


def test_prompts_are_remembered_where_they_are_sent() -> None:
    """The next request with the same beginning goes there; dry runs leave no trace."""
    core = core_over("ab", "lmetric: detector = 0")
    for name in "ab":
        report(core, name, num_running=1.0, queued_prefill_tokens=0.0)

    def begin(**more: Any) -> tuple[Decision, Intention]:
        blocks = PromptBlocks(names=("x", "y"), block_tokens=16)
        return started(core, blocks=blocks, indicators=RequestIndicators(prompt_tokens=40), **more)

    assert placed_at(begin(dry_run=True)[1]) == "a"
    decision, intention = begin(excluded={"a"})
    assert reserve_at(intention) == "b"
    decision.reserved(10.0, 101.0)
    decision, intention = begin()
    assert reserve_at(intention) == "b"
    assert decision.explanation.candidates()[1].read["p_tokens"] == 8.0


def test_unknown_hits_of_a_forecast_leave_the_estimate_of_the_scheduler() -> None:
    """Known ones replace it, 0 as well; a conflict changes that no more than the first forecasts do."""
    core = core_over("ab", "expr: predicted_e2e_s - prefix_hit_tokens")

    def begin(**more: Any) -> tuple[Decision, Intention]:
        blocks = PromptBlocks(names=("x", "y"), block_tokens=16)
        return started(core, blocks=blocks, indicators=RequestIndicators(prompt_tokens=40), **more)

    def chosen(hit_tokens: int | None, *, conflicts: bool = False) -> str:
        decision, asked = begin()
        assert isinstance(asked, Ask)
        made = Answer(FORECAST, replace(forecast_of(1.0), prefix_hit_tokens=hit_tokens), 0, EPOCH)
        intention = decision.answers(dict.fromkeys("ab", made), 0.0)
        if conflicts:
            intention = decision.conflict(made._replace(version=1), 0.0)
        return reserve_at(intention)

    decision, asked = begin(excluded={"a"})
    assert isinstance(asked, Ask)
    decision.answers(replies(asked, {"b": 1.0}), 0.0)
    decision.reserved(10.0, 101.0)
    assert chosen(None) == chosen(None, conflicts=True) == "b"
    assert chosen(0) == "a"

    def chosen_by_columns(hit_tokens: float) -> str:
        decision, asked = begin()
        assert isinstance(asked, Ask)
        columns = {"predicted_e2e_s": np.ones(2), "prefix_hit_tokens": np.full(2, hit_tokens)}
        return reserve_at(decision.answers_in_columns((columns,), 0.0))

    assert chosen_by_columns(math.nan) == "b"
    assert chosen_by_columns(0.0) == "a"


def test_policies_keep_their_state_and_are_bounded_in_number() -> None:
    """Requests may name any; the one in use is never dropped."""
    core = core_over("ab", "round_robin")
    first = core.policy
    assert reserve_at(started(core)[1]) == "a"
    for number in range(MAX_POLICIES + 5):
        core.policy_named(f"jsq: waiting_weight = {number}")
    assert core.policy_named("round_robin") is first
    assert core.use_policy("jsq") is core.policy
    assert core.decision(PlacementRequest(), "round_robin").policy is first


@pytest.mark.parametrize(
    "text", [*POLICIES, HOLD, "jsq: hold = 'batch_size < 4'", "expr: score = '1', tie_break = 'num_running'"]
)
def test_the_best_is_the_first_of_the_full_order(text: str) -> None:
    """The fast choice equals the first of all sorted: those that admit before others, those that never finish last."""
    rng, num_infinite = np.random.default_rng(11), 0
    for _ in range(150):
        candidates = random_fleet(rng)
        more = ("predicted_queue_s", "predicted_preemptions", "delay_worst_s", "others_preempted")
        candidates.add({name: rng.choice([0.0, 0.5, 2.0, math.nan], len(candidates)) for name in more})
        policy = policy_from(text, seed=1)
        if not policy.needs_forecast:
            del candidates.columns["predicted_e2e_s"]
        comparison = Comparison(policy, InstanceDirectory(InstanceTable(candidates.instance_ids)))
        comparison.compared = candidates
        comparison.score()
        fast = comparison.best()
        order = comparison.ordered(candidates, comparison.scores)
        assert fast == order[0]
        assert fast == plainly_best(comparison)
        num_infinite += comparison.never_finishes(fast)
    assert num_infinite < 75


def plainly_best(comparison: Comparison) -> int:
    """Sort all positions by all that counts, in plain Python."""
    compared, policy = comparison.compared, comparison.policy
    assert compared is not None
    assert comparison.scores is not None
    e2e_s = compared["predicted_e2e_s"] if policy.needs_forecast else np.zeros(len(compared))
    tie_break = np.zeros(len(compared)) if policy._tie_break is None else policy._tie_break(compared)
    admits = np.ones(len(compared), bool) if comparison.admits is None else comparison.admits

    def key(position: int) -> tuple[Any, ...]:
        score, tie = float(comparison.scores[position]), float(tie_break[position])
        unknown = (
            math.isnan(score),
            0.0 if math.isnan(score) else score,
            math.isnan(tie),
            0.0 if math.isnan(tie) else tie,
        )
        return (e2e_s[position] == math.inf, not admits[position], *unknown, position)

    return min(range(len(compared)), key=key)
