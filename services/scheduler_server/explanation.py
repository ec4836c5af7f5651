"""A placement in the words of the wire."""

from __future__ import annotations

import math
import time

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2
from scheduler.candidate_ranking import Candidate, CandidateStatus
from services.rpc.messages import forecast_message, indicators_message
from services.scheduler_server.placement_request import Placement, PlacementRequest

MOST_NEXT = 3
MOST_NAMED = 4

FATES = {
    CandidateStatus.UNASKED: common_pb2.CANDIDATE_FATE_UNSPECIFIED,
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


def decision_message(
    placement: Placement, wish: PlacementRequest, scheduler_id: str, *, explain: bool
) -> common_pb2.Decision:
    """Write a decision down; with all candidates where an explanation was asked for."""
    skipped = [
        candidate
        for candidate in placement.candidates
        if not candidate.is_compared and candidate.fate is not CandidateStatus.NOT_SHORTLISTED
    ]
    message = common_pb2.Decision(
        request_id=wish.request.request_id,
        instance=placement.chosen.message,
        policy=placement.policy,
        basis=placement.basis,
        why=why(placement, skipped),
        forecast=None if placement.forecast is None else forecast_message(placement.forecast),
        tag=wish.request.tag if wish.request.HasField("tag") else None,
        decision_s=placement.decision_s,
        reserved_for_s=placement.reserved_for_s,
        scheduler_id=scheduler_id,
        decided_unix_s=time.time(),
        num_candidates=placement.num_candidates,
        num_skipped=len(skipped),
        next_best=[sidecar.message for sidecar in placement.ranking[1 : 1 + MOST_NEXT]],
    )
    if explain:
        message.candidates.extend(candidate_message(candidate, placement.basis) for candidate in placement.everybody())
    return message


def why(placement: Placement, skipped: list[Candidate]) -> str:
    """Say in one line what a decision rests on."""
    forecast, num = placement.forecast, placement.num_candidates - len(skipped)
    if placement.basis == common_pb2.DECISION_BASIS_LAST_RESORT:
        line = f"nobody could be compared: {placement.candidate.note or 'no forecast'}"
    elif forecast is not None:
        num_foretold = sum(candidate.forecast is not None for candidate in placement.candidates)
        few = f", {num_foretold} of them foretold" if 0 < num_foretold < num else ""
        line = f"{placement.policy} over {num}{few}: {seconds(forecast)}{runner_up(placement)}"
        if placement.num_conflicts:
            line += f", after {placement.num_conflicts} conflicts"
    else:
        line = f"{placement.policy} over {num}"
    if placement.held_s > 0:
        line += f"; held {placement.held_s:.3f} s{'' if placement.candidate.admits else ', and nobody admitted it'}"
    if skipped:
        named = [f"{candidate.instance_id}: {candidate.note}" for candidate in skipped[:MOST_NAMED]]
        more = f", and {len(skipped) - MOST_NAMED} more" if len(skipped) > MOST_NAMED else ""
        line += f"; without {'; '.join(named)}{more}"
    return line


def seconds(forecast: Forecast) -> str:
    """Say what is foreseen."""
    return f"e2e {forecast.e2e_s:.3f} s, ttft {forecast.ttft_s:.3f} s"


def runner_up(placement: Placement) -> str:
    """Say who would have been next."""
    if len(placement.ranking) < 2:
        return ""
    name = placement.ranking[1].name
    forecast = next(one.expected for one in placement.candidates if one.instance_id == name)
    return "" if forecast is None else f"; next {name}: e2e {forecast.e2e_s:.3f} s"


def candidate_message(candidate: Candidate, basis: common_pb2.DecisionBasis.ValueType) -> common_pb2.Candidate:
    """Write a candidate down as the decision saw it."""
    forecast, fate = candidate.expected, candidate.fate
    if basis == common_pb2.DECISION_BASIS_LAST_RESORT and fate is CandidateStatus.LATE and candidate.indicators:
        fate = CandidateStatus.LAST_INDICATORS
    read = {name: value for name, value in candidate.read.items() if math.isfinite(value)}
    known = {**read, **candidate.indicators}  # what it told last, and what was reckoned from it
    return common_pb2.Candidate(
        instance_id=candidate.instance_id,
        fate=FATES[fate],
        score=None if candidate.score is None or math.isnan(candidate.score) else candidate.score,
        forecast=None if forecast is None else forecast_message(forecast),
        indicators=indicators_message(known, age_s=candidate.age_s) if known else None,
        note=candidate.note or ("" if candidate.admits else "does not admit it now"),
        answered_s=candidate.answered_s,
    )
