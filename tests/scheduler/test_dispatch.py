"""Ranking candidates of whom more or less is known, on cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from predictor.forecast import Forecast
from scheduler.dispatch import Candidate, Fate, behind, order
from scheduler.policies import POLICIES, Policy


def policy(name: str = "block") -> Policy:
    """A fresh one."""
    return POLICIES[name].make(np.random.default_rng(1))


def forecast(e2e_s: float, prefill_s: float = 0.1) -> Forecast:
    """A forecast for a prompt that is computed at once."""
    return Forecast(
        request_id="r", ttft_s=prefill_s, e2e_s=e2e_s, tpot_s=0.01, queue_s=0.0, output_tokens=9, num_preemptions=0,
        prefix_hit_tokens=0,
    )  # fmt: skip


def heard(name: str, e2e_s: float, promised: int = 0) -> Candidate:
    """One that gave a forecast."""
    return Candidate(instance_id=name, fate=Fate.FORECAST, forecast=forecast(e2e_s), promised=promised)


def ranking(*candidates: Candidate, by: Policy | None = None) -> tuple[str, ...]:
    """Who comes first, who next."""
    decision = order(candidates, by or policy())
    return () if decision is None else decision.ranking


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
    late = Candidate(instance_id="a", fate=Fate.LATE, indicators={"num_running": 9.0})
    down = Candidate(instance_id="b", fate=Fate.DOWN)
    draining = Candidate(instance_id="c", fate=Fate.DRAINING)
    assert ranking(draining, down, late, heard("d", 5.0), heard("e", math.inf)) == ("d", "a", "b", "c", "e")


@pytest.mark.parametrize("fate", [Fate.REFUSED, Fate.EXCLUDED, Fate.STOPPED])
def test_who_cannot_serve_is_no_last_resort(fate: Fate) -> None:
    """Neither a refusal nor the caller's wish is overruled for want of others."""
    assert ranking(Candidate(instance_id="a", fate=fate)) == ()


def test_last_resorts_go_by_what_was_last_known_and_sent_there_since() -> None:
    """The least busy one first; of those that nobody ever heard of, whoever got least."""
    busy = Candidate(instance_id="a", fate=Fate.LATE, indicators={"num_running": 3.0, "num_waiting": 1.0})
    idle = Candidate(instance_id="b", fate=Fate.LATE, indicators={"num_running": 3.0}, unseen=2)
    new, newer = (Candidate(instance_id=name, fate=Fate.LATE, unseen=5 - n) for n, name in enumerate("cd"))
    assert ranking(new, newer, busy, idle) == ("a", "b", "d", "c")


def test_an_engine_that_failed_lately_comes_last_whatever_its_forecast() -> None:
    """A dead engine looks idle to its sidecar; those who sent requests there know better."""
    failed = heard("a", 1.0)
    failed.engine_failed = True
    assert ranking(failed, heard("b", 9.0)) == ("b", "a")
    assert ranking(failed) == ("a",)


def test_policies_that_look_at_nothing_rank_the_unasked() -> None:
    """Round-robin takes turns among those that may be asked, and leaves out the others."""
    takes_turns = policy("round_robin")
    candidates = [Candidate(instance_id=name) for name in "abc"]
    candidates[1].fate = Fate.DOWN
    assert [ranking(*candidates, by=takes_turns)[0] for _ in range(3)] == ["a", "c", "a"]
