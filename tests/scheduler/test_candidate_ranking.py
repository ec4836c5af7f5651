"""Ranking candidates of whom more or less is known, on cases worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scheduler.candidate_ranking import (
    Candidate,
    CandidateStatus,
    Ranking,
    as_ranked,
    behind,
    by_forecasts,
    forecast_columns,
    order,
)

from predictor.forecast_result import Forecast
from scheduler.instance_table import InstanceTable
from scheduler.policy import policy_from


def forecast(e2e_s: float, prefill_s: float = 0.1) -> Forecast:
    """A forecast for a prompt that is computed at once."""
    return Forecast(
        request_id="r", ttft_s=prefill_s, e2e_s=e2e_s, tpot_s=0.01, queue_s=0.0, output_tokens=9, num_preemptions=0,
        prefix_hit_tokens=0,
    )  # fmt: skip


def heard(name: str, e2e_s: float, promised: int = 0) -> Candidate:
    """One that gave a forecast."""
    return Candidate(instance_id=name, fate=CandidateStatus.FORECAST, forecast=forecast(e2e_s), promised=promised)


def ranking(*candidates: Candidate, by: str | Ranking = "block") -> tuple[str, ...]:
    """Who comes first, who next."""
    if isinstance(by, str):
        by = by_forecasts(policy_from(by), InstanceTable(one.instance_id for one in candidates).candidates())
    return tuple(candidate.instance_id for candidate in order(candidates, by))


def test_promises_made_since_a_forecast_count() -> None:
    """Each promise costs a prefill; equals then go by how many they have got."""
    assert ranking(heard("a", 2.0, promised=2), heard("b", 2.0, promised=1), heard("c", 2.15)) == ("b", "c", "a")


def test_a_correction_moves_all_times_alike_and_never_by_nothing() -> None:
    """Waiting longer delays first and last token; a prompt that is all in the cache still counts for something."""
    later = behind(forecast(2.0), 3)
    assert (later.queue_s, later.ttft_s, later.e2e_s) == pytest.approx((0.3, 0.4, 2.3))
    assert behind(forecast(2.0, prefill_s=0.0), 1).e2e_s == pytest.approx(2.02)
    assert behind(forecast(math.inf), 1) == forecast(math.inf)


def test_those_without_a_forecast_come_after_those_with_one() -> None:
    """Late ones first, then those that are down or make no sense, then draining ones; never who never finishes first."""
    late = Candidate(instance_id="a", fate=CandidateStatus.LATE, indicators={"num_running": 9.0})
    down = Candidate(instance_id="b", fate=CandidateStatus.DOWN)
    draining = Candidate(instance_id="c", fate=CandidateStatus.DRAINING)
    assert ranking(draining, down, late, heard("d", 5.0), heard("e", math.inf)) == ("d", "a", "b", "c", "e")


@pytest.mark.parametrize("fate", [CandidateStatus.REFUSED, CandidateStatus.EXCLUDED, CandidateStatus.STOPPED])
def test_who_cannot_serve_is_no_last_resort(fate: CandidateStatus) -> None:
    """Neither a refusal nor the caller's wish is overruled for want of others."""
    assert ranking(Candidate(instance_id="a", fate=fate)) == ()


def test_last_resorts_go_by_what_was_last_known_and_sent_there_since() -> None:
    """The least busy one first; of those that nobody ever heard of, whoever got least."""
    busy = Candidate(instance_id="a", fate=CandidateStatus.LATE, indicators={"num_running": 3.0, "num_waiting": 1.0})
    idle = Candidate(instance_id="b", fate=CandidateStatus.LATE, indicators={"num_running": 3.0}, unseen=2)
    new, newer = (Candidate(instance_id=name, fate=CandidateStatus.LATE, unseen=5 - n) for n, name in enumerate("cd"))
    assert ranking(new, newer, busy, idle) == ("a", "b", "d", "c")


def test_an_engine_that_failed_lately_comes_last_whatever_its_forecast() -> None:
    """A dead engine looks idle to its sidecar; those who sent requests there know better."""
    failed = heard("a", 1.0)
    failed.engine_failed = True
    assert ranking(failed, heard("b", 9.0)) == ("b", "a")
    assert ranking(failed) == ("a",)


def test_those_that_were_not_looked_at_come_before_those_that_failed() -> None:
    """Whom a shortlist left out is well, as far as is known; the least busy first."""
    left = [
        Candidate(instance_id=name, fate=CandidateStatus.NOT_SHORTLISTED, indicators={"num_running": load})
        for name, load in (("a", 9.0), ("b", 1.0))
    ]
    late = Candidate(instance_id="c", fate=CandidateStatus.LATE, indicators={"num_running": 0.0})
    assert ranking(late, *left, heard("d", 5.0)) == ("d", "b", "a", "c")


def test_who_was_ranked_once_is_not_ranked_anew() -> None:
    """Policies that remember are asked once; who fails falls out of the ranking, and others keep their places."""
    candidates = [Candidate(instance_id=name, fate=CandidateStatus.INDICATORS) for name in "cab"]
    by = as_ranked(candidates)
    late = Candidate(instance_id="z", fate=CandidateStatus.INDICATORS)
    assert ranking(*reversed(candidates), by=by) == ("c", "a", "b")
    candidates[0].fate = CandidateStatus.DOWN
    assert ranking(late, *candidates, by=by) == ("a", "b", "z", "c")


def test_scores_are_noted_and_ties_go_by_id() -> None:
    """Whatever the order in which sidecars answered."""
    candidates = [heard("b", 2.0), heard("c", 1.0), heard("a", 2.0)]
    assert ranking(*candidates) == ("c", "a", "b")
    assert [candidate.score for candidate in candidates] == [2.0, 1.0, 2.0]


def test_a_forecast_of_which_a_part_is_missing_comes_after_whole_ones() -> None:
    """A policy over delays cannot compare who did not tell them."""
    told = heard("b", 9.0)
    told.forecast = replace(forecast(9.0), delay_sum_s=1.0)
    assert ranking(heard("a", 1.0), told, by="marginal") == ("b", "a")


def test_forecasts_become_columns() -> None:
    """By the indicators' names; what nobody knows is NaN."""
    whole = replace(forecast(3.0), delay_sum_s=2.0, num_preemptions=4, prefix_hit_tokens=5)
    columns = forecast_columns([whole, None], ("predicted_e2e_s", "delay_sum_s", "predicted_preemptions"))
    assert {name: column[0] for name, column in columns.items()} == {
        "predicted_e2e_s": 3.0,
        "delay_sum_s": 2.0,
        "predicted_preemptions": 4.0,
    }
    assert all(np.isnan(column[1]) for column in columns.values())
