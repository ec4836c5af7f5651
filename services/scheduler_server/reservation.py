"""From what was heard of the candidates to a promise by one of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate_ranking import LAST_RESORTS, Candidate, CandidateStatus, Ranking, order
from scheduler.unranked import Unranked
from services.placement.settings import SchedulerSettings
from services.rpc.messages import forecast_message
from services.scheduler_server.forecast_fan_out import ForecastFanOut
from services.scheduler_server.instance_registry import ModelInstances
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.placement_request import Placement, PlacementRequest
from services.scheduler_server.replies import STATES, SidecarError, forecast_in

MOST_FAILED_RESERVES = 2  # then the request goes where it was to go, without a promise

RESORTS = LAST_RESORTS.keys() - {
    CandidateStatus.NOT_SHORTLISTED
}  # of whom nobody knows whether they could promise anything

BASIS_OF = {
    CandidateStatus.UNASKED: common_pb2.DECISION_BASIS_BLIND,
    CandidateStatus.INDICATORS: common_pb2.DECISION_BASIS_INDICATORS,
    CandidateStatus.FORECAST: common_pb2.DECISION_BASIS_FORECAST,
}

RESULTS = {
    predictor_pb2.RESERVE_RESULT_RESERVED: "reserved",
    predictor_pb2.RESERVE_RESULT_EXTENDED: "extended",
    predictor_pb2.RESERVE_RESULT_CONFLICT: "conflict",
    predictor_pb2.RESERVE_RESULT_REFUSED: "refused",
}


@dataclass(slots=True, kw_only=True)
class ReservationAttempt:
    """One decision under way: rank, reserve at the first, and rank anew where others came first or it fails."""

    wish: PlacementRequest
    policy: str
    ranking: Ranking
    group: ModelInstances
    candidates: list[Candidate]  # those that were looked at, and those that are not well
    rest: Unranked  # everybody else
    may_hold: bool  # the request can wait for somebody who admits it
    foretold_anyway: bool  # have the choice foretold, where the policy does without
    settings: SchedulerSettings
    measures: SchedulerMetrics
    num_conflicts: int = 0
    num_failed: int = 0

    async def settled(self, asker: ForecastFanOut) -> Placement | None:
        """Find the place; None where the request may be held, and nobody admits it now.

        ConnectionError where nobody could take the request, ValueError where nobody ever will.
        """
        while True:
            placement = self._best()
            if self.may_hold and not placement.candidate.admits:
                return None
            chosen, candidate = placement.chosen, placement.candidate
            if self.wish.dry_run:
                return placement
            chosen.engine.allows(time.monotonic())  # if it failed lately, this is its trial
            if candidate.fate in RESORTS or self.num_failed >= MOST_FAILED_RESERVES:
                chosen.sent_without_promise(self.wish.request)
                return placement
            if self.foretold_anyway:
                placement.forecast = await asker.foretell(self.wish, chosen)
            if await self._reserved(placement):
                return placement

    def _best(self) -> Placement:
        """Rank everybody as things stand."""
        ranked = self._ranked()
        if not ranked or not (ranked[0].is_compared and not ranked[0].would_never_finish):
            self._look_at_all()
            ranked = self._ranked()
        if not ranked:
            self.measures.undecided.inc()
            raise refusal_of(self.candidates)
        sidecars, candidate = self.group.sidecars, ranked[0]
        return Placement(
            policy=self.policy,
            chosen=sidecars[candidate.instance_id],
            candidate=candidate,
            basis=basis_of(candidate),
            ranking=[sidecars[one.instance_id] for one in ranked],
            candidates=self.candidates,
            rest=self.rest,
            num_candidates=len(sidecars),
            everybody=self._look_at_all,
            forecast=candidate.expected if candidate.is_compared else None,
            num_conflicts=self.num_conflicts,
        )

    def _ranked(self) -> list[Candidate]:
        for candidate in self.candidates:
            if candidate.forecast is not None:
                versions = self.group.sidecars[candidate.instance_id].versions
                candidate.promised = versions.since(candidate.version, candidate.epoch)
        return order(self.candidates, self.ranking)

    def _look_at_all(self) -> Sequence[Candidate]:
        if len(self.candidates) < len(self.group.sidecars):
            for seen in self.rest.candidates({candidate.instance_id for candidate in self.candidates}):
                candidate = self.group.sidecars[seen.instance_id].as_known(seen.fate, seen.note)
                candidate.score, candidate.read = seen.score, seen.read
                self.candidates.append(candidate)
        return self.candidates

    async def _reserved(self, placement: Placement) -> bool:
        """Have the chosen instance promise a place; if it does not, note in the candidate why."""
        candidate, wish = placement.candidate, self.wish
        conditional = candidate.forecast is not None and self.num_conflicts < self.settings.most_conflicts
        request = predictor_pb2.ReserveRequest(
            request=wish.request,
            ttl_s=self.settings.reservation_s,
            holder=self.settings.scheduler_id,
            forecast=None if placement.forecast is None else forecast_message(placement.forecast),
            policy=placement.policy,
            instance_id=candidate.instance_id,
            if_version=candidate.version + candidate.promised if conditional else None,
            if_epoch=candidate.epoch if conditional else None,
        )
        try:
            response = await placement.chosen.reserve(request)
        except SidecarError as error:
            self.measures.reserves.labels(error.fate.value).inc()
            self.num_failed += error.fate is not CandidateStatus.REFUSED
            candidate.fate, candidate.note = error.fate, f"when reserving: {error.note}"
            return False
        self.measures.reserves.labels(RESULTS.get(response.result, "other")).inc()
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT:
            self.num_conflicts += 1
            hear_anew(candidate, response, wish.request.request_id)
            return False
        if response.result == predictor_pb2.RESERVE_RESULT_REFUSED:
            refusal = response.prediction.refusal
            if response.state in STATES:
                candidate.fate, candidate.note = STATES[response.state][0], f"when reserving: {refusal.reason}"
            else:
                candidate.fate, candidate.note = CandidateStatus.REFUSED, f"{refusal.field}: {refusal.reason}"
            return False
        placement.reserved_for_s = response.expires_in_s
        return True


def hear_anew(candidate: Candidate, response: predictor_pb2.ReserveResponse, request_id: str) -> None:
    """Take the forecast that a conflict comes with."""
    try:
        forecast, refusal = forecast_in(response.prediction, request_id)
    except ValueError as error:
        candidate.fate, candidate.note = CandidateStatus.INVALID, f"when reserving: {error}"
        return
    before = candidate.forecast
    if forecast is not None and before is not None and forecast.delay_sum_s is None:  # nobody asked for delays anew
        forecast = replace(forecast, delay_sum_s=before.delay_sum_s, delay_worst_s=before.delay_worst_s,
                           others_preempted=before.others_preempted)  # fmt: skip
    candidate.version, candidate.epoch, candidate.forecast = response.version, response.epoch, forecast
    if refusal:
        candidate.fate, candidate.note = CandidateStatus.REFUSED, refusal


def basis_of(candidate: Candidate) -> common_pb2.DecisionBasis.ValueType:
    """Tell what a choice rests on."""
    if not candidate.is_compared:
        return common_pb2.DECISION_BASIS_LAST_RESORT
    return BASIS_OF[candidate.fate]


def refusal_of(candidates: Sequence[Candidate]) -> Exception:
    """Say why a request can be sent nowhere: it is its own fault, or there is nobody to take it."""
    refused = [candidate for candidate in candidates if candidate.fate is CandidateStatus.REFUSED]
    if refused and all(
        candidate.fate in (CandidateStatus.REFUSED, CandidateStatus.EXCLUDED) for candidate in candidates
    ):
        return ValueError(f"request.{refused[0].note}")
    notes = "; ".join(f"{candidate.instance_id}: {candidate.note}" for candidate in candidates[:8])
    return ConnectionError(f"no instance can take the request: {notes}")
