"""Objectives in messages: what a request asks for by fields, by a name, and after a scheduler changed it."""

from __future__ import annotations

from predictor.request import REAL_TIME, Slo
from protos.block.v1 import common_pb2
from scheduler.objectives import DEMOTE, SERVE_LATE, SHED, Objective
from services.rpc.messages import CLASS_VALUES, CLASSES

WHEN_LATE_NAMES = {
    common_pb2.WHEN_LATE_UNSPECIFIED: SERVE_LATE,
    common_pb2.WHEN_LATE_SERVE: SERVE_LATE,
    common_pb2.WHEN_LATE_DEMOTE: DEMOTE,
    common_pb2.WHEN_LATE_SHED: SHED,
}
WHEN_LATE_VALUES = {
    SERVE_LATE: common_pb2.WHEN_LATE_SERVE,
    DEMOTE: common_pb2.WHEN_LATE_DEMOTE,
    SHED: common_pb2.WHEN_LATE_SHED,
}


def objective_from(message: common_pb2.Request | common_pb2.Objective, name: str = "") -> Objective:
    """Read what a request asks for; `name` is that by which it did so."""
    slo = message.slo
    return Objective(
        name=name,
        request_class=CLASSES.get(message.request_class, REAL_TIME),
        slo=Slo(
            ttft_s=slo.ttft_s if slo.HasField("ttft_s") else None,
            tpot_s=slo.tpot_s if slo.HasField("tpot_s") else None,
        ),
        priority=message.priority,
        weight=message.weight if message.HasField("weight") else 1.0,
        when_late=WHEN_LATE_NAMES.get(message.when_late, SERVE_LATE),
    )


def objective_message(objective: Objective) -> common_pb2.Objective:
    """Write an objective."""
    return common_pb2.Objective(
        request_class=CLASS_VALUES[objective.request_class],
        slo=_slo_message(objective.slo),
        priority=objective.priority,
        weight=None if objective.weight == 1.0 else objective.weight,
        when_late=WHEN_LATE_VALUES[objective.when_late],
    )


def fill_from(request: common_pb2.Request, objective: Objective, *, has_priority: bool = False) -> None:
    """Give a request what it does not say itself; its name of an objective is then resolved.

    Without `has_priority`, a priority of 0 is one that is not given.
    """
    if request.request_class == common_pb2.REQUEST_CLASS_UNSPECIFIED:
        request.request_class = CLASS_VALUES[objective.request_class]
    slo = _slo_message(objective.slo)
    if slo is not None:
        slo.MergeFrom(request.slo)
        request.slo.CopyFrom(slo)
    if not (has_priority or request.priority):
        request.priority = objective.priority
    if not request.HasField("weight") and objective.weight != 1.0:
        request.weight = objective.weight
    if request.when_late == common_pb2.WHEN_LATE_UNSPECIFIED:
        request.when_late = WHEN_LATE_VALUES[objective.when_late]
    request.ClearField("objective")


def set_objective(request: common_pb2.Request, objective: Objective) -> None:
    """Replace what a request asks for."""
    _set_objective(request, objective_message(objective))


def with_objective(request: common_pb2.Request, objective: common_pb2.Objective) -> common_pb2.Request:
    """Return a copy of a request that asks for what a decision says."""
    changed = common_pb2.Request()
    changed.CopyFrom(request)
    _set_objective(changed, objective)
    return changed


def _set_objective(request: common_pb2.Request, objective: common_pb2.Objective) -> None:
    request.request_class, request.priority = objective.request_class, objective.priority
    request.when_late = objective.when_late
    request.ClearField("slo")
    if objective.HasField("slo"):
        request.slo.CopyFrom(objective.slo)
    request.ClearField("weight")
    if objective.HasField("weight"):
        request.weight = objective.weight
    request.ClearField("objective")


def _slo_message(slo: Slo) -> common_pb2.Slo | None:
    return None if slo == Slo() else common_pb2.Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
