"""From what was heard of the candidates to a promise by one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.dispatch import LAST_RESORTS, Candidate, Fate, order
from scheduler.instances import InstanceView
from scheduler.policies import Policy
from services.scheduler_server.asking import Asker
from services.scheduler_server.measures import Measures
from services.scheduler_server.replies import SidecarError, forecast_in
from services.scheduler_server.settings import SchedulerSettings
from services.scheduler_server.sidecar import Sidecar
from services.scheduler_server.wish import Placement, Wish
from services.wire import forecast_message

MOST_FAILED_RESERVES = 2  # then the request goes where it was to go, without a promise

RESULTS = {
    predictor_pb2.RESERVE_RESULT_RESERVED: "reserved",
    predictor_pb2.RESERVE_RESULT_EXTENDED: "extended",
    predictor_pb2.RESERVE_RESULT_CONFLICT: "conflict",
    predictor_pb2.RESERVE_RESULT_REFUSED: "refused",
}


@dataclass(slots=True, kw_only=True)
class Choice:
    """One decision under way: rank, reserve at the first, and rank anew where others came first or it fails."""

    wish: Wish
    policy_name: str
    policy: Policy
    blind: bool  # the policy looks at nothing
    sidecars: Mapping[str, Sidecar]
    candidates: Sequence[Candidate]
    settings: SchedulerSettings
    measures: Measures
    num_conflicts: int = 0
    num_failed: int = 0

    async def settled(self, asker: Asker) -> Placement:
        """Find the place. ConnectionError where nobody could take the request, ValueError where nobody ever will."""
        while True:
            placement = self._best()
            chosen, candidate = placement.chosen, placement.candidate
            if self.wish.dry_run:
                return placement
            chosen.engine.allows(time.monotonic())  # if it failed lately, this is its trial
            if candidate.fate in LAST_RESORTS or self.num_failed >= MOST_FAILED_RESERVES:
                chosen.unseen += 1
                return placement
            if self.blind and self.settings.forecast_always:
                placement.forecast = await asker.foretell(self.wish, chosen)
            if await self._reserved(placement):
                return placement

    def _best(self) -> Placement:
        """Rank everybody as things stand."""
        for candidate in self.candidates:
            if candidate.forecast is not None:
                versions = self.sidecars[candidate.instance_id].versions
                candidate.promised = versions.since(candidate.version, candidate.epoch)
        decision = order(self.candidates, self.policy)
        if decision is None:
            self.measures.undecided.inc()
            raise refusal_of(self.candidates)
        if self.blind and decision.scores:
            self.policy = repeating(decision.scores)
        chosen = self.sidecars[decision.instance_id]
        candidate = next(candidate for candidate in self.candidates if candidate.instance_id == chosen.name)
        return Placement(
            policy=self.policy_name,
            chosen=chosen,
            candidate=candidate,
            basis=basis_of(candidate),
            ranking=[self.sidecars[name] for name in decision.ranking],
            candidates=self.candidates,
            forecast=candidate.view().forecast if candidate.is_compared else None,
            num_conflicts=self.num_conflicts,
        )

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
            self.num_failed += error.fate is not Fate.REFUSED
            candidate.fate, candidate.note = error.fate, f"when reserving: {error.note}"
            return False
        self.measures.reserves.labels(RESULTS.get(response.result, "other")).inc()
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT:
            self.num_conflicts += 1
            hear_anew(candidate, response, wish.request.request_id)
            return False
        if response.result == predictor_pb2.RESERVE_RESULT_REFUSED:
            refusal = response.prediction.refusal
            candidate.fate, candidate.note = Fate.REFUSED, f"{refusal.field}: {refusal.reason}"
            return False
        placement.reserved_for_s = response.expires_in_s
        return True


def hear_anew(candidate: Candidate, response: predictor_pb2.ReserveResponse, request_id: str) -> None:
    """Take the forecast that a conflict comes with."""
    try:
        forecast, refusal = forecast_in(response.prediction, request_id)
    except ValueError as error:
        candidate.fate, candidate.note = Fate.INVALID, f"when reserving: {error}"
        return
    candidate.version, candidate.epoch, candidate.forecast = response.version, response.epoch, forecast
    if refusal:
        candidate.fate, candidate.note = Fate.REFUSED, refusal


def repeating(scores: Mapping[str, float]) -> Policy:
    """Make a policy of scores that have been given: whose turn it is does not change by asking again."""

    def policy(views: Sequence[InstanceView]) -> list[float]:
        return [scores[view.instance_id] for view in views]

    return policy


def basis_of(candidate: Candidate) -> common_pb2.DecisionBasis.ValueType:
    """Tell what a choice rests on."""
    if not candidate.is_compared:
        return common_pb2.DECISION_BASIS_LAST_RESORT
    return common_pb2.DECISION_BASIS_BLIND if candidate.forecast is None else common_pb2.DECISION_BASIS_FORECAST


def refusal_of(candidates: Sequence[Candidate]) -> Exception:
    """Say why a request can be sent nowhere: it is its own fault, or there is nobody to take it."""
    refused = [candidate for candidate in candidates if candidate.fate is Fate.REFUSED]
    if refused and all(candidate.fate in (Fate.REFUSED, Fate.EXCLUDED) for candidate in candidates):
        return ValueError(f"request.{refused[0].note}")
    notes = "; ".join(f"{candidate.instance_id}: {candidate.note}" for candidate in candidates[:8])
    return ConnectionError(f"no instance can take the request: {notes}")
