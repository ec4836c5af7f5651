"""From a request to the instance that it goes to: lengths, forecasts, a policy, a promise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.forecast import Forecast
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.dispatch import COMPARED, LAST_RESORTS, Candidate, Fate, order
from scheduler.instances import InstanceView
from scheduler.policies import Policy, PolicyEntry, policy_named
from services.scheduler_server.fleet import Fleet
from services.scheduler_server.lengths import Lengths
from services.scheduler_server.measures import Measures
from services.scheduler_server.settings import SchedulerSettings
from services.scheduler_server.sidecar import Sidecar, SidecarError, prediction_in
from services.wire import forecast_message, request_from

MOST_FAILED_RESERVES = 2  # then the request goes where it was to go, without a promise


@dataclass(slots=True, kw_only=True)
class Wish:
    """A request to be placed; it is completed on the way with what was found out about it."""

    request: common_pb2.Request
    taken_s: float  # when it came, by the monotonic clock
    prompt: bytes = b""
    policy: str = ""
    excluded: Collection[str] = ()
    dry_run: bool = False
    waited_s: float = 0.0  # before it came

    def __post_init__(self) -> None:
        """Remember how old it was."""
        self.waited_s = self.request.waited_s


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a request goes, and all that was looked at on the way."""

    policy: str
    chosen: Sidecar
    candidate: Candidate
    basis: common_pb2.DecisionBasis.ValueType
    ranking: Sequence[Sidecar]
    candidates: Sequence[Candidate]
    forecast: Forecast | None = None
    reserved_for_s: float | None = None
    num_conflicts: int = 0
    decision_s: float = 0.0


@dataclass(slots=True)
class _Round:
    """What a decision knows so far."""

    wish: Wish
    policy: Policy
    sidecars: Mapping[str, Sidecar]
    candidates: list[Candidate]
    blind: bool
    num_conflicts: int = 0
    num_failed: int = 0
    by_name: dict[str, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the candidates findable."""
        self.by_name = {candidate.instance_id: candidate for candidate in self.candidates}


class Placer:
    """Decides for one request after the other, any number at once. It remembers nothing that a restart must keep."""

    def __init__(self, settings: SchedulerSettings, fleet: Fleet, lengths: Lengths, measures: Measures) -> None:
        """Decide over a fleet."""
        self._settings = settings
        self._fleet = fleet
        self._lengths = lengths
        self._measures = measures
        self._policies: dict[str, tuple[PolicyEntry, Policy]] = {}
        self._deciding = asyncio.Semaphore(settings.max_deciding)
        self._policy(settings.policy)

    def _policy(self, name: str) -> tuple[PolicyEntry, Policy]:
        if name not in self._policies:
            entry = policy_named(name)
            self._policies[name] = (entry, entry.make(np.random.default_rng(self._settings.seed)))
        return self._policies[name]

    async def place(self, wish: Wish) -> Placement:
        """Decide where a request goes, and reserve there.

        ConnectionError where there is no instance that could take it, ValueError where none ever will.
        """
        name = wish.policy or self._settings.policy
        entry, policy = self._policy(name)
        sidecars = {sidecar.name: sidecar for sidecar in self._fleet.serving(wish.request.model)}
        ask = entry.needs_forecast or self._settings.forecast_always
        await self._lengths.settle(wish.request, wish.prompt, ask=ask)
        try:
            request_from(wish.request)
        except ValueError as error:
            raise ValueError(f"request.{error}") from None
        candidates = self._known(sidecars.values(), wish.excluded)
        if entry.needs_forecast:
            await self._ask(wish, sidecars, candidates)
        round_ = _Round(wish, policy, sidecars, candidates, blind=not entry.needs_forecast)
        placement = await self._choose(round_, name)
        placement.decision_s = time.monotonic() - wish.taken_s
        self._measures.decision_s.labels(name).observe(placement.decision_s)
        self._measures.decisions.labels(name, BASES[placement.basis]).inc()
        return placement

    # Looking.

    def _known(self, sidecars: Collection[Sidecar], excluded: Collection[str]) -> list[Candidate]:
        """Begin with what is known without asking anybody."""
        now_s = time.monotonic()
        candidates = []
        for sidecar in sidecars:
            if sidecar.name in excluded:
                candidate = sidecar.as_known(Fate.EXCLUDED, "the caller does not want it")
            elif sidecar.instance.state == "draining":
                candidate = sidecar.as_known(Fate.DRAINING, "is draining")
            elif not sidecar.is_open():
                sidecar.try_again()
                candidate = sidecar.as_known(Fate.DOWN, "its sidecar failed lately and is left alone")
            else:
                candidate = sidecar.as_known()
            if sidecar.engine.is_open() and not sidecar.engine.allows(now_s):
                candidate.engine_failed = True
                candidate.note = candidate.note or "its engine failed lately"
            candidates.append(candidate)
        return candidates

    async def _ask(self, wish: Wish, sidecars: Mapping[str, Sidecar], candidates: list[Candidate]) -> None:
        """Have all forecast that may be asked, in one deadline for all; candidates are replaced by what they said."""
        places = [place for place, candidate in enumerate(candidates) if candidate.fate is Fate.UNASKED]
        if not places:
            return
        async with self._deciding:
            start_s = time.monotonic()
            wish.request.waited_s = wish.waited_s + start_s - wish.taken_s
            question = predictor_pb2.PredictRequest(requests=[wish.request]).SerializeToString()
            asked = [sidecars[candidates[place].instance_id] for place in places]
            answers = [sidecar.ask(question) for sidecar in asked]
            await asyncio.wait(answers, timeout=self._settings.sidecar_deadline_s)
            answered_s = time.monotonic() - start_s
        self._measures.fan_out_s.observe(answered_s)
        for place, sidecar, answer in zip(places, asked, answers, strict=True):
            candidate = sidecar.candidate(answer, wish.request.request_id)
            candidate.answered_s = answered_s
            candidate.engine_failed = candidates[place].engine_failed
            candidates[place] = candidate

    # Choosing.

    async def _choose(self, round_: _Round, name: str) -> Placement:
        """Rank, and promise the request to the first; where others came first or it fails, rank anew."""
        while True:
            decision = self._order(round_)
            if decision is None:
                self._measures.undecided.inc()
                raise refusal_of(round_.candidates)
            chosen = round_.sidecars[decision[0]]
            candidate = round_.by_name[chosen.name]
            resort = candidate.fate not in COMPARED or candidate.engine_failed
            placement = Placement(
                policy=name,
                chosen=chosen,
                candidate=candidate,
                basis=basis_of(candidate, resort=resort),
                ranking=[round_.sidecars[one] for one in decision],
                candidates=round_.candidates,
                forecast=candidate.view().forecast if candidate.fate in COMPARED else None,
                num_conflicts=round_.num_conflicts,
            )
            if round_.wish.dry_run:
                return placement
            if candidate.fate in LAST_RESORTS or round_.num_failed >= MOST_FAILED_RESERVES:
                chosen.unseen += 1
                return placement
            if round_.blind and self._settings.forecast_always:
                placement.forecast = await self._foretold(round_.wish, chosen)
            if await self._promised(round_, placement):
                return placement

    def _order(self, round_: _Round) -> tuple[str, ...] | None:
        if not round_.blind:
            for candidate in round_.candidates:
                if candidate.forecast is not None:
                    sidecar = round_.sidecars[candidate.instance_id]
                    candidate.promised = sidecar.promised_since(candidate.version, candidate.epoch)
        decision = order(round_.candidates, round_.policy)
        if decision is None:
            return None
        if round_.blind and decision.scores:
            round_.policy = settled(decision.scores)  # whose turn it is does not change by asking again
        return decision.ranking

    async def _promised(self, round_: _Round, placement: Placement) -> bool:
        """Reserve; if it does not come off, note in the candidate why."""
        candidate, wish = placement.candidate, round_.wish
        conditional = candidate.forecast is not None and round_.num_conflicts < self._settings.most_conflicts
        request = predictor_pb2.ReserveRequest(
            request=wish.request,
            ttl_s=self._settings.reservation_s,
            holder=self._settings.scheduler_id,
            forecast=None if placement.forecast is None else forecast_message(placement.forecast),
            policy=placement.policy,
            instance_id=candidate.instance_id,
            if_version=candidate.version + candidate.promised if conditional else None,
            if_epoch=candidate.epoch if conditional else None,
        )
        try:
            response = await placement.chosen.reserve(request)
        except SidecarError as error:
            self._measures.reserves.labels(error.fate.value).inc()
            round_.num_failed += error.fate is not Fate.REFUSED
            candidate.fate, candidate.note = error.fate, f"when reserving: {error.note}"
            return False
        self._measures.reserves.labels(RESULTS.get(response.result, "other")).inc()
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT:
            round_.num_conflicts += 1
            self._heard_anew(candidate, response, wish.request.request_id)
            return False
        if response.result == predictor_pb2.RESERVE_RESULT_REFUSED:
            refusal = response.prediction.refusal
            candidate.fate, candidate.note = Fate.REFUSED, f"{refusal.field}: {refusal.reason}"
            return False
        placement.reserved_for_s = response.expires_in_s
        placement.num_conflicts = round_.num_conflicts
        return True

    def _heard_anew(self, candidate: Candidate, response: predictor_pb2.ReserveResponse, request_id: str) -> None:
        """Take the forecast that a conflict comes with."""
        renewed = predictor_pb2.PredictResponse(predictions=[response.prediction])
        try:
            forecast, refusal = prediction_in(renewed, request_id)
        except ValueError as error:
            candidate.fate, candidate.note = Fate.INVALID, f"when reserving: {error}"
            return
        candidate.version, candidate.epoch, candidate.forecast = response.version, response.epoch, forecast
        if refusal:
            candidate.fate, candidate.note = Fate.REFUSED, refusal

    async def _foretold(self, wish: Wish, sidecar: Sidecar) -> Forecast | None:
        """Have the choice of a policy that looks at nothing forecast, for comparison."""
        question = predictor_pb2.PredictRequest(requests=[wish.request]).SerializeToString()
        answer = sidecar.ask(question)
        await asyncio.wait([answer], timeout=self._settings.sidecar_deadline_s)
        return sidecar.candidate(answer, wish.request.request_id).forecast


BASES = {
    common_pb2.DECISION_BASIS_FORECAST: "forecast",
    common_pb2.DECISION_BASIS_BLIND: "blind",
    common_pb2.DECISION_BASIS_LAST_RESORT: "last_resort",
}

RESULTS = {
    predictor_pb2.RESERVE_RESULT_RESERVED: "reserved",
    predictor_pb2.RESERVE_RESULT_EXTENDED: "extended",
    predictor_pb2.RESERVE_RESULT_CONFLICT: "conflict",
    predictor_pb2.RESERVE_RESULT_REFUSED: "refused",
}


def settled(scores: Mapping[str, float]) -> Policy:
    """Make a policy of scores that have been given already."""

    def policy(views: Sequence[InstanceView]) -> list[float]:
        return [scores[view.instance_id] for view in views]

    return policy


def basis_of(candidate: Candidate, *, resort: bool) -> common_pb2.DecisionBasis.ValueType:
    """Tell what a choice rests on."""
    if resort:
        return common_pb2.DECISION_BASIS_LAST_RESORT
    return common_pb2.DECISION_BASIS_BLIND if candidate.forecast is None else common_pb2.DECISION_BASIS_FORECAST


def refusal_of(candidates: Sequence[Candidate]) -> Exception:
    """Say why a request can be sent nowhere: it is its own fault, or there is nobody to take it."""
    refused = [candidate for candidate in candidates if candidate.fate is Fate.REFUSED]
    if refused and all(candidate.fate in (Fate.REFUSED, Fate.EXCLUDED) for candidate in candidates):
        return ValueError(f"request.{refused[0].note}")
    notes = "; ".join(f"{candidate.instance_id}: {candidate.note}" for candidate in candidates[:8])
    return ConnectionError(f"no instance can take the request: {notes}")
