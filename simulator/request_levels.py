"""What each request of a run asks for, as decisions read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from predictor.request import CLASSES, Slo
from scheduler.objectives import NO_OBJECTIVE, SERVE_LATE, Objective
from simulator.workload import Workload


@dataclass(slots=True, kw_only=True)
class RequestLevels:
    """Lists with one entry per request; the times are infinite where a request has no target."""

    due_s: list[float] = field(default_factory=list)  # of first tokens
    tpot_slo_s: list[float] = field(default_factory=list)
    objectives: list[Objective] = field(default_factory=list)  # changed where a decision demotes a request
    tenants: list[str] = field(default_factory=list)


def levels_of(work: Workload) -> RequestLevels:
    """Return what the requests of a workload ask for."""
    num, levels = len(work), work.service
    if levels is None:
        none = [math.inf] * num
        return RequestLevels(due_s=none, tpot_slo_s=none, objectives=[NO_OBJECTIVE] * num, tenants=[""] * num)
    when_late = [SERVE_LATE] * num if levels.when_late is None else levels.when_late.tolist()
    rows = zip(
        levels.request_class.tolist(), levels.ttft_slo_s.tolist(), levels.tpot_slo_s.tolist(),
        levels.priority.tolist(), levels.weight.tolist(), when_late, strict=True,
    )  # fmt: skip
    made: dict[str, Objective] = {}  # by the text of a row, as NaN equals no other

    def objective(row: tuple[int, float, float, int, float, str]) -> Objective:
        name = repr(row)
        if name not in made:
            number, ttft_s, tpot_s, priority, weight, late = row
            made[name] = Objective(
                request_class=CLASSES[number],
                slo=Slo(ttft_s=_target(ttft_s), tpot_s=_target(tpot_s)),
                priority=priority,
                weight=weight,
                when_late=late,
            )
        return made[name]

    return RequestLevels(
        due_s=np.nan_to_num(work.arrival_s + levels.ttft_slo_s, nan=math.inf).tolist(),
        tpot_slo_s=np.nan_to_num(levels.tpot_slo_s, nan=math.inf).tolist(),
        objectives=[objective(row) for row in rows],
        tenants=[""] * num if levels.tenant is None else levels.tenant.tolist(),
    )


def _target(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
