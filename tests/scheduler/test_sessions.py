"""Sessions stay on their instances, where that costs little and no deadline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast_result import Forecast
from predictor.request import DECODE, PREFILL
from scheduler.candidates import RequestIndicators
from scheduler.core import SchedulerCore
from scheduler.intentions import Answer, Ask, Placed
from scheduler.placement import PlacementRequest
from scheduler.policy import policy_from
from scheduler.sessions import MAX_ID_CHARACTERS, SessionMemory
from tests.scheduler.scripted import EPOCH, forecast_of
from tests.scheduler.test_decision import FORECAST, core_over, report, reserve_at
from tests.strategies import examples

AFFINE = "block: session_affinity = 0.5"


def place(core: SchedulerCore, forecasts: Mapping[str, Forecast], **fields: Any) -> str:
    """Where a request goes, by what instances answer."""
    decision = core.decision(PlacementRequest(indicators=RequestIndicators(prompt_tokens=60), **fields))
    intention = decision.start(0.0)
    if isinstance(intention, Ask):
        answers = {name: Answer(FORECAST, forecasts[name], 0, EPOCH) for name in intention.instance_ids}
        intention = decision.answers(answers, 0.0)
    if isinstance(intention, Placed):
        return decision.placement.instance_id
    name = reserve_at(intention)
    assert isinstance(decision.reserved(10.0, 0.0), Placed)
    return name


def times(**e2e_s: float) -> dict[str, Forecast]:
    """Forecasts that differ in time alone."""
    return {name: forecast_of(seconds, delays=True) for name, seconds in e2e_s.items()}


FIRST = times(a=1.0, b=2.0)  # a session begins at a


def core_with_session(policy: str = AFFINE, **fields: Any) -> SchedulerCore:
    """A core that has placed a session's first request at `a`."""
    core = core_over("ab", policy)
    assert place(core, FIRST, session_id="s", **fields) == "a"
    return core


@pytest.mark.parametrize(("slower_s", "expected"), [(0.0, "a"), (0.49, "a"), (0.51, "b"), (math.inf, "b")])
def test_staying_costs_at_most_the_affinity(slower_s: float, expected: str) -> None:
    """The cost is how much longer the whole request is predicted to take."""
    assert place(core_with_session(), times(a=2.0 + slower_s, b=2.0), session_id="s") == expected


def test_a_session_follows_its_last_request() -> None:
    """Once it has moved, it stays where it is now."""
    core = core_with_session()
    assert place(core, times(a=9.0, b=1.0), session_id="s") == "b"
    assert place(core, times(a=1.0, b=1.3), session_id="s") == "b"


@pytest.mark.parametrize("fields", [{}, {"session_id": "other"}, {"session_id": "s", "client_id": "y"}])
def test_others_are_placed_as_without_affinity(fields: dict[str, str]) -> None:
    """A request without a session, one of an unknown session, and one of another tenant's."""
    assert place(core_with_session(), times(a=1.1, b=1.0), **fields) == "b"


def test_a_dry_run_moves_no_session() -> None:
    """It asks where a request would go."""
    core = core_with_session()
    assert place(core, times(a=9.0, b=1.0), session_id="s", dry_run=True) == "b"
    assert place(core, times(a=1.1, b=1.0), session_id="s") == "a"


def test_a_session_leaves_an_instance_that_is_gone_or_excluded() -> None:
    """The next one is that of the policy."""
    assert place(core_with_session(), times(a=1.0, b=1.3), session_id="s", excluded={"a"}) == "b"


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ({"attained": False}, {}),
        ({"others_missed": 1}, {}),
        ({"others_missed": 2}, {"others_missed": 1}),
    ],
)
def test_no_promise_is_broken_for_a_session(of_a: dict[str, Any], of_b: dict[str, Any]) -> None:
    """The request's own deadlines and those of others are kept as well as on the best instance."""
    forecasts = {
        "a": forecast_of(1.1, delays=True, **of_a),
        "b": forecast_of(1.0, delays=True, **of_b),
    }
    assert place(core_with_session(), forecasts, session_id="s") == "b"


def test_an_instance_that_does_not_admit_the_request_does_not_get_it() -> None:
    """A held request goes to the session's instance only where the condition holds there."""
    core = core_with_session(
        'block: session_affinity = 0.5, hold = "others_preempted < 1 and predicted_queue_s < 0.05"'
    )
    forecasts = {"a": forecast_of(1.0, queue_s=0.1, delays=True), "b": forecast_of(1.0, delays=True)}
    assert place(core, forecasts, session_id="s") == "b"


outcomes = st.fixed_dictionaries(
    {
        "e2e_s": st.sampled_from((1.0, 1.2, 1.6, math.inf)),
        "attained": st.booleans(),
        "others_missed": st.integers(0, 2),
    }
)


@examples(200)
@given(st.lists(outcomes, min_size=2, max_size=5), st.integers(0, 4), st.sampled_from((0.0, 0.3, 1.0)))
def test_affinity_never_costs_more_than_it_may(each: list[dict[str, Any]], first: int, bound_s: float) -> None:
    """Beside the choice without it, attained stays, no more others are missed, and the time grows by the bound."""
    forecasts = {name: forecast_of(delays=True, **one) for name, one in zip("abcde", each, strict=False)}
    home = list(forecasts)[first % len(forecasts)]
    core = core_over("".join(forecasts), f"block: session_affinity = {bound_s}")
    assert (
        place(core, {name: forecast_of(1.0 + (name != home), delays=True) for name in forecasts}, session_id="s")
        == home
    )
    best = forecasts[place(core_over("".join(forecasts), "block"), forecasts)]
    chosen = forecasts[place(core, forecasts, session_id="s")]
    assert chosen.attained >= best.attained
    assert chosen.others_missed <= best.others_missed
    assert chosen.e2e_s == best.e2e_s or chosen.e2e_s <= best.e2e_s + bound_s
    if forecasts[home] == best:
        assert chosen == best


def test_the_cost_for_policies_by_indicators_is_the_prefill_that_is_queued() -> None:
    """They read no forecasts, and know nothing of deadlines."""
    core = core_over({"a": 1.0, "b": 1.0}, "jsq: session_affinity = 0.5")
    assert place(core, {}, session_id="s") == "a"
    report(core, "a", num_running=9.0, queued_prefill_s=0.4)
    report(core, "b", num_running=1.0, queued_prefill_s=0.0)
    assert place(core, {}, session_id="s") == "a"
    assert place(core, {}) == "b"
    report(core, "a", num_running=9.0, queued_prefill_s=0.6)
    assert place(core, {}, session_id="s") == "b"


def test_the_instance_of_a_session_is_on_the_shortlist() -> None:
    """Beside the k best of the others."""
    core = core_over({"a": 1.0, "b": 2.0, "c": 3.0}, "block: k = 1, shortlist = 'jsq', session_affinity = 0.5")
    assert place(core, times(a=1.0), session_id="s") == "a"
    report(core, "a", num_running=9.0)
    assert place(core, times(a=1.2, b=1.0), session_id="s") == "a"


def test_expressions_read_where_a_session_is() -> None:
    """1 at its instance, 0 elsewhere, and 0 everywhere for an unknown one."""
    core = core_with_session("expr: predicted_e2e_s - 0.3 * session_here")
    assert place(core, times(a=1.2, b=1.0), session_id="s") == "a"
    assert place(core, times(a=1.4, b=1.0), session_id="s") == "b"
    assert place(core, times(a=1.2, b=1.0)) == "b"


def test_policies_that_read_no_sessions_remember_none() -> None:
    """Then nothing is spent on them."""
    core = core_with_session("block")
    assert len(core.sessions) == 0


def test_the_session_that_is_unused_for_longest_is_forgotten_first() -> None:
    """The memory has a bound in sessions, and their names one in characters."""
    memory = SessionMemory(max_sessions=2)
    requests = [PlacementRequest(session_id=name) for name in ("x" * 1000, "b", "c")]
    memory.placed(requests[0], "1")
    memory.placed(requests[1], "2")
    memory.placed(requests[0], "3")
    memory.placed(requests[2], "4")
    memory.placed(PlacementRequest(), "5")
    assert [memory.instance_of(one) for one in requests] == ["3", None, "4"]
    assert memory.instance_of(PlacementRequest()) is None
    assert len(memory) == 2
    assert memory.instance_of(PlacementRequest(session_id="x" * MAX_ID_CHARACTERS)) == "3"


def test_prefill_legs_are_remembered_apart() -> None:
    """A prompt's prefix is where prefill legs went, the blocks of the response elsewhere."""
    memory = SessionMemory()
    for leg, name in ((PREFILL, "p"), (DECODE, "d")):
        memory.placed(PlacementRequest(session_id="s", leg=leg), name)
    assert memory.instance_of(PlacementRequest(session_id="s", leg=PREFILL)) == "p"
    assert memory.instance_of(PlacementRequest(session_id="s")) == "d"


@pytest.mark.parametrize(
    "text", ["slo: length_quantiles = 3", "slo: session_affinity = 1, length_quantiles = 3, k = 8"]
)
def test_policies_whose_condition_alone_reads_forecasts_have_these_settings(text: str) -> None:
    """Also that of prefill legs, where none is named."""
    policy = policy_from(text)
    assert policy.length_quantiles == 3
    assert policy.needs_forecast
    assert policy.legs is not None
    assert policy.legs.prefill.length_quantiles == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("block: session_affinity = -1", "policy: block: session_affinity: must be a number from 0 on"),
        ("block: session_affinity = 'x'", "policy: block: session_affinity: must be a number from 0 on"),
        ("block: length_quantiles = 2", "policy: block: length_quantiles: must be an odd number from 1 to 9, not 2"),
        ("block: length_quantiles = 1.0", "policy: block: length_quantiles: must be an odd number"),
        ("jsq: length_quantiles = 3", "policy: jsq: length_quantiles: is for policies that read forecasts"),
    ],
)
def test_impossible_settings_are_refused(text: str, error: str) -> None:
    """The error names the policy and the field."""
    with pytest.raises(ValueError, match=f"^{error}"):
        policy_from(text)
