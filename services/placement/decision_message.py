"""A placement in its wire form."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from protos.block.v1 import common_pb2
from scheduler.candidate import Candidate, CandidateStatus
from scheduler.explanation import why
from scheduler.objectives import Objective
from scheduler.placement import DecisionBasis, Leg, Placement
from services.rpc.messages import LEG_VALUES, forecast_message, indicators_message
from services.rpc.objectives import objective_message

MAX_NEXT_BEST = 3
DEMOTED = "; demoted to best effort, as no instance keeps its deadlines"

FATES = {
    CandidateStatus.NOT_QUERIED: common_pb2.CANDIDATE_FATE_UNSPECIFIED,
    CandidateStatus.FORECAST: common_pb2.CANDIDATE_FATE_FORECAST,
    CandidateStatus.INDICATORS: common_pb2.CANDIDATE_FATE_INDICATORS,
    CandidateStatus.NOT_SHORTLISTED: common_pb2.CANDIDATE_FATE_NOT_SHORTLISTED,
    CandidateStatus.LAST_INDICATORS: common_pb2.CANDIDATE_FATE_LAST_INDICATORS,
    CandidateStatus.REFUSED: common_pb2.CANDIDATE_FATE_REFUSED,
    CandidateStatus.LATE: common_pb2.CANDIDATE_FATE_LATE,
    CandidateStatus.DOWN: common_pb2.CANDIDATE_FATE_DOWN,
    CandidateStatus.EXCLUDED: common_pb2.CANDIDATE_FATE_EXCLUDED,
    CandidateStatus.INVALID: common_pb2.CANDIDATE_FATE_INVALID,
    CandidateStatus.DRAINING: common_pb2.CANDIDATE_FATE_DOWN,
    CandidateStatus.STOPPED: common_pb2.CANDIDATE_FATE_DOWN,
}

BASES = {
    DecisionBasis.FORECAST: common_pb2.DECISION_BASIS_FORECAST,
    DecisionBasis.INDICATORS: common_pb2.DECISION_BASIS_INDICATORS,
    DecisionBasis.BLIND: common_pb2.DECISION_BASIS_BLIND,
    DecisionBasis.LAST_RESORT: common_pb2.DECISION_BASIS_LAST_RESORT,
}

InstanceMessages = Callable[[str], common_pb2.Instance | None]


def decision_message(  # noqa: PLR0913 - what a message is made of
    placement: Placement,
    request: common_pb2.Request,
    instance_of: InstanceMessages,
    *,
    asked: Objective,
    scheduler_id: str,
    num_candidates: int,
    state_age_s: float | None,
    explain: bool,
) -> common_pb2.Decision:
    """Convert a placement of a request that `asked` for something.

    All candidates are in it where an explanation was asked for.
    """
    objective = placement.decision.request.objective
    is_demoted = objective != asked
    next_best = (instance_of(name) for name in placement.next_best[:MAX_NEXT_BEST])
    message = common_pb2.Decision(
        request_id=request.request_id,
        instance=instance_of(placement.instance_id),
        policy=placement.policy,
        basis=BASES[placement.basis],
        why=why(placement, num_candidates) + (DEMOTED if is_demoted else ""),
        forecast=None if placement.forecast is None else forecast_message(placement.forecast),
        tag=request.tag if request.HasField("tag") else None,
        decision_s=placement.decision_s,
        reserved_for_s=placement.reserved_for_s,
        scheduler_id=scheduler_id,
        decided_unix_s=time.time(),
        num_candidates=num_candidates,
        num_skipped=len(placement.decision.explanation.skipped()),
        next_best=[instance for instance in next_best if instance is not None],
        disaggregation=placement.disaggregation,
        demoted=is_demoted,
        objective=objective_message(objective) if is_demoted or asked.name else None,
        held_s=placement.held_s or None,
        state_age_s=state_age_s,
    )
    if placement.prefill is not None:
        message.prefill.CopyFrom(_leg_message(placement.prefill, instance_of))
    if explain:
        message.candidates.extend(candidate_messages(placement))
    return message


def _leg_message(leg: Leg, instance_of: InstanceMessages) -> common_pb2.PlacedLeg:
    return common_pb2.PlacedLeg(
        leg=LEG_VALUES[leg.kind],
        instance=instance_of(leg.instance_id),
        forecast=None if leg.forecast is None else forecast_message(leg.forecast),
        reserved_for_s=leg.reserved_for_s,
    )


def candidate_messages(placement: Placement) -> Iterator[common_pb2.Candidate]:
    """Convert all candidates of a placement, as the decision saw them."""
    for candidate in placement.decision.explanation.candidates():
        yield _candidate_message(candidate, placement.basis)


def _candidate_message(candidate: Candidate, basis: DecisionBasis) -> common_pb2.Candidate:
    forecast, status = candidate.predicted, candidate.status
    if basis is DecisionBasis.LAST_RESORT and status is CandidateStatus.LATE and candidate.indicators:
        status = CandidateStatus.LAST_INDICATORS
    read = {name: value for name, value in candidate.read.items() if math.isfinite(value)}
    known = {**read, **candidate.indicators}
    return common_pb2.Candidate(
        instance_id=candidate.instance_id,
        fate=FATES[status],
        score=None if candidate.score is None or math.isnan(candidate.score) else candidate.score,
        forecast=None if forecast is None else forecast_message(forecast),
        indicators=indicators_message(known, age_s=candidate.age_s) if known else None,
        note=candidate.note or ("" if candidate.admits else "does not admit it now"),
        answered_s=candidate.answered_s,
    )
