"""Objectives in messages: what fills what, and what replaces what."""

from __future__ import annotations

import pytest

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from protos.block.v1 import common_pb2
from scheduler.objectives import DEMOTE, NO_OBJECTIVE, SERVE_LATE, SHED, Objective
from services.rpc.objectives import (
    WHEN_LATE_NAMES,
    WHEN_LATE_VALUES,
    fill_from,
    objective_from,
    objective_message,
    set_objective,
    with_objective,
)

CHAT = Objective(
    name="chat", slo=Slo(ttft_s=0.5, tpot_s=0.05), priority=3, weight=2.0, when_late=SHED, request_class=REAL_TIME
)
BATCH = Objective(request_class=BEST_EFFORT, when_late=DEMOTE)


def test_what_a_request_says_itself_has_precedence() -> None:
    """Each field by itself: a target that it gives leaves the other one to the objective."""
    request = common_pb2.Request(request_id="r", objective="chat")
    fill_from(request, CHAT)
    assert objective_from(request, "chat") == CHAT
    assert request.objective == ""

    request = common_pb2.Request(slo=common_pb2.Slo(tpot_s=0.2), weight=1.0, when_late=common_pb2.WHEN_LATE_SERVE)
    request.request_class, request.priority = common_pb2.REQUEST_CLASS_BEST_EFFORT, -1
    fill_from(request, CHAT)
    assert objective_from(request) == Objective(
        request_class=BEST_EFFORT, slo=Slo(ttft_s=0.5, tpot_s=0.2), priority=-1, weight=1.0, when_late=SERVE_LATE
    )


@pytest.mark.parametrize(("has_priority", "priority"), [(True, 0), (False, 3)])
def test_a_priority_of_zero_counts_where_it_is_given(has_priority: bool, priority: int) -> None:
    """On the wire it cannot be told from none; the gateway knows whether a client gave it."""
    request = common_pb2.Request()
    fill_from(request, CHAT, has_priority=has_priority)
    assert request.priority == priority


def test_a_request_without_anything_asks_for_nothing() -> None:
    """The defaults are those of a request without an objective; unknown values of later versions are ignored."""
    assert objective_from(common_pb2.Request()) == NO_OBJECTIVE
    request = common_pb2.Request()
    request.when_late = 7  # type: ignore[assignment]
    assert objective_from(request) == NO_OBJECTIVE
    fill_from(request, NO_OBJECTIVE)
    assert not request.HasField("slo")
    assert not request.HasField("weight")


def test_a_changed_objective_replaces_all_of_it() -> None:
    """Targets and weight go; the copy for the engine leaves the request as it was."""
    request = common_pb2.Request(request_id="r", client_id="c")
    fill_from(request, CHAT)
    before = request.SerializeToString()
    changed = with_objective(request, objective_message(BATCH))
    assert request.SerializeToString() == before
    assert objective_from(changed) == BATCH
    assert (changed.client_id, changed.HasField("slo"), changed.HasField("weight")) == ("c", False, False)
    set_objective(changed, CHAT)
    assert changed.SerializeToString() == before


def test_the_words_for_late_requests() -> None:
    """All are on the wire."""
    assert {WHEN_LATE_NAMES[number] for number in WHEN_LATE_VALUES.values()} == {SERVE_LATE, DEMOTE, SHED}
    assert set(WHEN_LATE_NAMES) == set(common_pb2.WhenLate.values())
