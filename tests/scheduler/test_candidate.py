"""One instance in one decision: its forecast corrected, its fields as columns, its chance as a fallback."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scheduler.candidate import (
    Candidate,
    CandidateStatus,
    delay_of_reservation_s,
    delayed,
    fallback_key,
    forecast_columns,
)
from tests.scheduler.scripted import forecast_of


def fallbacks(*candidates: Candidate) -> str:
    """The ids of candidates in the order in which they are tried."""
    return "".join(one.instance_id for one in sorted(candidates, key=fallback_key))


def test_a_correction_delays_all_times_alike_and_never_by_nothing() -> None:
    """Waiting longer delays first and last token; a prompt that is all in the cache still counts for something."""
    later = delayed(forecast_of(2.0), 3)
    assert (later.queue_s, later.ttft_s, later.e2e_s) == pytest.approx((0.3, 0.4, 2.3))
    assert delayed(forecast_of(2.0, ttft_s=0.0), 1).e2e_s == pytest.approx(2.02)
    assert delayed(forecast_of(math.inf), 1) == forecast_of(math.inf)
    assert delay_of_reservation_s(0.5, 0.2, 2.0) == pytest.approx(0.3)


def test_a_candidate_predicts_with_the_reservations_made_since() -> None:
    """Without any, the forecast is as the instance made it."""
    candidate = Candidate(instance_id="a", status=CandidateStatus.FORECAST, forecast=forecast_of(2.0))
    assert candidate.predicted is candidate.forecast
    candidate.num_reserved_since = 2
    assert candidate.predicted == delayed(forecast_of(2.0), 2)
    assert Candidate(instance_id="a", num_reserved_since=2).predicted is None


def test_fallbacks_are_ordered_by_their_chance_to_work() -> None:
    """Left out, late, down or invalid, draining; engines that failed come after all others."""
    order = {
        "a": CandidateStatus.DRAINING,
        "b": CandidateStatus.DOWN,
        "c": CandidateStatus.INVALID,
        "d": CandidateStatus.LATE,
        "e": CandidateStatus.LAST_INDICATORS,
        "f": CandidateStatus.NOT_SHORTLISTED,
    }
    candidates = [Candidate(instance_id=name, status=status) for name, status in order.items()]
    failed = Candidate(instance_id="_", status=CandidateStatus.FORECAST, engine_failed=True)
    assert fallbacks(failed, *candidates) == "fdebca_"
    assert all(one.may_be_fallback for one in (failed, *candidates))
    assert not any(one.is_compared for one in (failed, *candidates))


@pytest.mark.parametrize("status", [CandidateStatus.REFUSED, CandidateStatus.EXCLUDED, CandidateStatus.STOPPED])
def test_an_instance_that_cannot_serve_is_no_fallback(status: CandidateStatus) -> None:
    """Neither a refusal nor the caller's exclusion is overruled for lack of others."""
    assert not Candidate(instance_id="a", status=status).may_be_fallback


def test_equal_fallbacks_are_ordered_by_load() -> None:
    """By what was last known and sent there since; among the unknown by what was sent, then by id."""
    late = CandidateStatus.LATE
    busy = Candidate(instance_id="a", status=late, indicators={"num_running": 3.0, "num_waiting": 1.0})
    idle = Candidate(instance_id="b", status=late, indicators={"num_running": 3.0, "num_reserved": 0.0}, num_unseen=2)
    reserved = Candidate(instance_id="e", status=late, indicators={"num_running": 0.0, "num_reserved": 6.0})
    new, newer = (Candidate(instance_id=name, status=late, num_unseen=5 - n) for n, name in enumerate("cd"))
    same = Candidate(instance_id="f", status=late, num_unseen=4)
    assert fallbacks(new, same, newer, reserved, busy, idle) == "abedfc"


def test_forecasts_become_columns() -> None:
    """By the indicators' names; what is unknown is NaN."""
    whole = replace(forecast_of(3.0), delay_sum_s=2.0, num_preemptions=4, prefix_hit_tokens=5)
    columns = forecast_columns([whole, None], ("predicted_e2e_s", "delay_sum_s", "predicted_preemptions"))
    assert {name: column[0] for name, column in columns.items()} == {
        "predicted_e2e_s": 3.0,
        "delay_sum_s": 2.0,
        "predicted_preemptions": 4.0,
    }
    assert all(np.isnan(column[1]) for column in columns.values())
