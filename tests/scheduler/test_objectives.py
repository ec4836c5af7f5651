"""Objectives by name: what a table says, and how a bad one is refused."""

from __future__ import annotations

import re

import pytest

from predictor.request import BEST_EFFORT, REAL_TIME, Slo
from scheduler.instances import LATE, QUEUE_FULL, SHED_REASONS, OverloadedError
from scheduler.objectives import (
    DEMOTE,
    MAX_OBJECTIVES,
    NO_OBJECTIVES,
    SERVE_LATE,
    SHED,
    Objective,
    UnknownObjectiveError,
    objective_named,
    objectives_in,
)

TABLE = """
[[objective]]
name = "chat"
class = "real-time"
ttft_slo_s = 1
tpot_slo_s = 0.05
priority = -1
weight = 2
when_late = "shed"

[[objective]]
name = "batch"
class = "best-effort"

[[objective]]
name = "agent"
tpot_slo_s = 0.1
when_late = "demote"
"""


def test_a_table_gives_objectives_by_name() -> None:
    """What a table leaves out has the value that a request without an objective has."""
    objectives = objectives_in(TABLE, "file")
    assert list(objectives) == ["chat", "batch", "agent"]
    assert objectives["chat"] == Objective(
        name="chat", request_class=REAL_TIME, slo=Slo(ttft_s=1.0, tpot_s=0.05), priority=-1, weight=2.0, when_late=SHED
    )
    assert objectives["batch"] == Objective(name="batch", request_class=BEST_EFFORT)
    assert objectives["batch"].is_best_effort
    assert (objectives["agent"].slo, objectives["agent"].when_late) == (Slo(tpot_s=0.1), DEMOTE)
    assert (objectives["batch"].weight, objectives["batch"].when_late) == (1.0, SERVE_LATE)


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    """The error names the field or header, the value, and what to do."""
    objectives = objectives_in(TABLE, "file")
    assert objective_named("chat", objectives, field="x").name == "chat"
    with pytest.raises(UnknownObjectiveError, match="^x-block-objective: 'chatt' is no known objective; did you mean"):
        objective_named("chatt", objectives, field="x-block-objective")
    with pytest.raises(UnknownObjectiveError, match="^objective: 'chat' is unknown: .*--objectives FILE"):
        objective_named("chat", NO_OBJECTIVES, field="objective")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "objective: must be a list"),
        ("objective = 3", "objective: must be a list"),
        ("[objective]\nname = 'a'", "objective: must be a list"),
        ("[[objectives]]", "objectives: is no known table; did you mean objective"),
        ("objective = [3]", "objective[0].name: the entry must be a table, not 3"),
        ("[[objective]]", "objective[0].name: is missing"),
        ("[[objective]]\nname = 1", "objective[0].name: must be a text, not 1"),
        ("[[objective]]\nname = ''", "objective[0].name: must be a text"),
        ("[[objective]]\nname = ' a'", "objective[0].name: must be at most 256 printable"),
        ("[[objective]]\nname = 'ä'", "objective[0].name: must be at most 256 printable"),
        (f"[[objective]]\nname = '{257 * 'a'}'", "objective[0].name: must be at most 256 printable"),
        ("[[objective]]\nname = 'a'\n[[objective]]\nname = 'a'", "objective[1].name: 'a' is a duplicate"),
        (
            "[[objective]]\nname = 'a'\nttft_slo = 1",
            "objective[0].ttft_slo: is no known field; did you mean ttft_slo_s",
        ),
        (
            "[[objective]]\nname = 'a'\n[[objective]]\nname = 'b'\nweight = -1",
            "objective[1].weight: must be a number above 0, at most 1e+09, not -1",
        ),
        ("[[objective]]\nname = 'a'\nweight = inf", "objective[0].weight: must be a number above 0"),
        ("[[objective]]\nname = 'a'\nttft_slo_s = '1'", "objective[0].ttft_slo_s: must be a number above 0"),
        ("[[objective]]\nname = 'a'\ntpot_slo_s = true", "objective[0].tpot_slo_s: must be a number above 0"),
        ("[[objective]]\nname = 'a'\npriority = 1.5", "objective[0].priority: must be a whole number"),
        ("[[objective]]\nname = 'a'\nclass = 'slow'", "objective[0].class: 'slow' is neither real-time nor"),
        ("[[objective]]\nname = 'a'\nclass = []", "objective[0].class: [] is neither real-time nor"),
        ("[[objective]]\nname = 'a'\nwhen_late = 'drop'", "objective[0].when_late: must be one of serve, demote"),
        ("[[objective]\n", "is not TOML"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(text: str, error: str) -> None:
    """The line names the file, the entry and the field."""
    with pytest.raises(ValueError, match=f"^{re.escape(f'slo.toml: {error}')}[^\n]*$"):
        objectives_in(text, "slo.toml")


def test_a_table_is_bounded() -> None:
    """One more than the limit is refused."""
    tables = [f"[[objective]]\nname = 'o{number}'\n" for number in range(MAX_OBJECTIVES + 1)]
    assert len(objectives_in("".join(tables[1:]), "file")) == MAX_OBJECTIVES
    with pytest.raises(ValueError, match=f"^file: objective: must be at most {MAX_OBJECTIVES} tables"):
        objectives_in("".join(tables), "file")


def test_a_shed_request_has_a_reason() -> None:
    """Each reason has a message of its own; a decision may give a more precise one. All say what to do."""
    assert len({str(OverloadedError(reason)) for reason in SHED_REASONS}) == len(SHED_REASONS)
    assert str(OverloadedError(QUEUE_FULL).advised(None)) == "the admission queue is full; retry later"
    error = OverloadedError(LATE, "no instance delivers the first token within 0.5 s").advised(2.25)
    assert str(error) == (
        "no instance delivers the first token within 0.5 s; retry after 2.25 s, or ask to be served late "
        "(when_late: serve)"
    )
    assert (error.reason, error.retry_after_s) == (LATE, 2.25)
