"""What requests ask for: class, targets, priority, weight, and what happens where the targets cannot be kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from predictor.request import BEST_EFFORT, CLASSES, MAX_PRIORITY, REAL_TIME, Slo
from predictor.suggestions import did_you_mean, require_choice
from scheduler.toml_tables import entries_from, entries_in, require_fields, require_positive, require_text

# What becomes of a request whose deadlines no instance can keep any more: it is served late, where that harms the
# others least; it goes on as best effort; or it is refused.
SERVE_LATE, DEMOTE, SHED = "serve", "demote", "shed"
WHEN_LATE = (SERVE_LATE, DEMOTE, SHED)

MAX_OBJECTIVES = 1000  # that a table may name
MAX_NAME = 256  # characters; names travel in headers
FIELDS = ("name", "class", "ttft_slo_s", "tpot_slo_s", "priority", "weight", "when_late")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a request asks for; `name` is empty where it was not chosen by name."""

    name: str = ""
    request_class: str = REAL_TIME
    slo: Slo = field(default_factory=Slo)
    priority: int = 0
    weight: float = 1.0
    when_late: str = SERVE_LATE

    def __post_init__(self) -> None:
        """Refuse what means nothing, naming the field."""
        if self.request_class not in CLASSES:
            raise ValueError(f"class: {self.request_class!r} is neither {' nor '.join(CLASSES)}")
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ValueError(f"priority: must be a whole number within 32 bits, not {self.priority!r}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight: must be above 0, not {self.weight}")
        require_choice("when_late", self.when_late, WHEN_LATE)

    @property
    def is_best_effort(self) -> bool:
        """Whether it has to leave deadlines of real-time requests alone."""
        return self.request_class == BEST_EFFORT


NO_OBJECTIVE = Objective()

Objectives = Mapping[str, Objective]  # by name
NO_OBJECTIVES: Objectives = MappingProxyType({})


class UnknownObjectiveError(ValueError):
    """The table has no objective of this name."""


def objectives_in(text: str, source: str) -> Objectives:
    """Read a TOML document with a table [[objective]] for each name; errors start with its source."""
    return MappingProxyType({one.name: one for one in entries_in(text, source, "objective", objectives_from)})


def objectives_from(tables: Any) -> tuple[Objective, ...]:
    """Read a list of tables; the error for an invalid one has its index."""
    if isinstance(tables, list) and len(tables) > MAX_OBJECTIVES:
        raise ValueError(f"objective: must be at most {MAX_OBJECTIVES} tables, not {len(tables)}")
    return entries_from(tables, "objective", _objective_from)


def _objective_from(table: Mapping[str, Any]) -> Objective:
    require_fields(table, FIELDS, ("name",))
    name = table["name"]
    require_text("name", name)
    if len(name) > MAX_NAME or not (name.isascii() and name.isprintable()) or name != name.strip():
        raise ValueError(f"name: must be at most {MAX_NAME} printable ASCII characters, without spaces around")
    for number in ("ttft_slo_s", "tpot_slo_s", "weight"):
        if number in table:
            require_positive(number, table[number])
    return Objective(
        name=name,
        request_class=table.get("class", REAL_TIME),
        slo=Slo(ttft_s=_optional(table.get("ttft_slo_s")), tpot_s=_optional(table.get("tpot_slo_s"))),
        priority=table.get("priority", 0),
        weight=float(table.get("weight", 1.0)),
        when_late=table.get("when_late", SERVE_LATE),
    )


def _optional(value: float | None) -> float | None:
    return None if value is None else float(value)


def objective_named(name: str, objectives: Objectives, *, field: str) -> Objective:
    """Look an objective up; the error for an unknown name starts with the field, or the header, that had it."""
    found = objectives.get(name)
    if found is None:
        if not objectives:
            raise UnknownObjectiveError(f"{field}: {name!r} is unknown: this server has no table (--objectives FILE)")
        raise UnknownObjectiveError(f"{field}: {name!r} is no known objective{did_you_mean(name, objectives)}")
    return found
