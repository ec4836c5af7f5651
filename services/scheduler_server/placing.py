"""From a request to the instance that it goes to: lengths, a shortlist, forecasts, a policy, a promise."""

from __future__ import annotations

import time
from functools import partial

from scheduler.candidate_ranking import Candidate, CandidateStatus, Ranking, as_ranked, by_forecasts
from scheduler.candidates import Candidates, Facts
from scheduler.policy import Policy, policy_from
from scheduler.unranked import Unranked, unranked_of
from services.placement.settings import SchedulerSettings
from services.rpc.messages import request_from
from services.scheduler_server.admission_queue import AdmissionQueue
from services.scheduler_server.forecast_fan_out import ForecastFanOut, unwell_in
from services.scheduler_server.instance_registry import InstanceRegistry, ModelInstances
from services.scheduler_server.length_resolution import LengthResolver
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.placement_request import BASES, Placement, PlacementRequest
from services.scheduler_server.prefix_cache_index import Prompt, PromptPrefixes
from services.scheduler_server.reservation import ReservationAttempt

MOST_POLICIES = 64  # that requests ask for by themselves
MOST_RANKED = 8  # of those that are compared without being asked; more are looked at when all of these fail


class Placer:
    """Decides for one request after the other, any number at once. It remembers nothing that a restart must keep."""

    def __init__(
        self, settings: SchedulerSettings, fleet: InstanceRegistry, lengths: LengthResolver, measures: SchedulerMetrics
    ) -> None:
        """Decide over a fleet."""
        self._settings = settings
        self._fleet = fleet
        self._lengths = lengths
        self._measures = measures
        self._asker = ForecastFanOut(settings, measures)
        self._holding = AdmissionQueue(fleet.table, measures, settings.most_held)
        self._prefixes = PromptPrefixes(fleet.table)
        self._policies: dict[str, Policy] = {}
        self.policy = settings.policy
        self.use(settings.policy)

    def use(self, text: str) -> None:
        """Decide by this policy from now on, where requests ask for none; those under way go on by theirs."""
        self._listen_for(self._policy(text))
        self.policy = text

    def _listen_for(self, policy: Policy) -> None:
        """Have instances tell of themselves, where a policy reads that, or how large their caches are."""
        if policy.needs_told or policy.needs_prefix:
            self._fleet.watch()

    def _policy(self, text: str) -> Policy:
        policy = self._policies.get(text)
        if policy is None:
            policy = policy_from(text, self._settings.seed)
            if len(self._policies) >= MOST_POLICIES:
                del self._policies[next(name for name in self._policies if name != self.policy)]
            self._policies[text] = policy
        return policy

    async def place(self, wish: PlacementRequest) -> Placement:
        """Decide where a request goes, and reserve there.

        ConnectionError where there is no instance that could take it, ValueError where none ever will.
        """
        start_s = time.monotonic()
        policy = self._policy(wish.policy or self.policy)
        self._listen_for(policy)
        self._fleet.serving(wish.request.model)  # is there anybody?
        await self._complete(
            wish, for_forecasts=policy.needs_forecast or policy.needs_tag or self._settings.forecast_always
        )
        attempt = partial(self._placed, wish, policy)
        if policy.holds and not wish.dry_run:
            placement = await self._holding.placed(wish, policy.hold_s, attempt)
        else:
            found = await attempt(False)
            assert found is not None
            placement = found
        placement.decision_s = time.monotonic() - start_s - placement.held_s
        self._measures.decision_s.labels(policy.name).observe(placement.decision_s)
        self._measures.decisions.labels(policy.name, BASES[placement.basis]).inc()
        return placement

    async def _complete(self, wish: PlacementRequest, *, for_forecasts: bool) -> None:
        """Find out what forecasts need to know of the request, and refuse one that makes no sense."""
        await self._lengths.settle(wish.request, wish.prompt, ask=for_forecasts)
        try:
            request_from(wish.request)
        except ValueError as error:
            raise ValueError(f"request.{error}") from None

    async def _placed(self, wish: PlacementRequest, policy: Policy, may_hold: bool) -> Placement | None:
        """Find a place as things are now; None where the request may be held, and nobody admits it."""
        group = self._fleet.serving(wish.request.model)
        table = self._fleet.table
        unwell = unwell_in(group, self._fleet.troubled, wish.excluded)
        places = group.without([candidate.instance_id for candidate in unwell], table.place_of)
        prompt = self._prefixes.of(wish) if policy.needs_prefix else Prompt()
        known = table.candidates(_facts(wish), time.monotonic(), places)
        if policy.needs_prefix:
            self._prefixes.look_up(prompt, known)
        if may_hold and len(known):
            known = self._holding.worth_asking(known)
            if not len(known):
                return None
        looked = policy.among(known) if len(known) else known
        if policy.needs_forecast:
            compared = [group.sidecars[name].as_known() for name in looked.instance_ids]
            await self._asker.ask(wish, group.sidecars, [*compared, *unwell], delays=policy.needs_delays)
            ranking: Ranking = by_forecasts(policy, looked)
            rest = unranked_of(looked)
        else:
            compared, rest = _scored(policy, looked, group)
            ranking = as_ranked(compared)
        choice = ReservationAttempt(
            wish=wish,
            policy=policy.text,
            ranking=ranking,
            group=group,
            candidates=[*compared, *unwell],
            rest=rest,
            may_hold=may_hold,
            foretold_anyway=self._settings.forecast_always and not policy.needs_forecast,
            settings=self._settings,
            measures=self._measures,
        )
        placement = await choice.settled(self._asker)
        if may_hold:
            self._holding.heard(compared, time.monotonic())
        if placement is not None and not wish.dry_run:
            self._prefixes.sent(placement.chosen.name, prompt)
        return placement


def _facts(wish: PlacementRequest) -> Facts:
    request = wish.request
    tokens = request.tag.median_tokens if request.HasField("tag") else float(request.output_tokens or "nan")
    return Facts(prompt_tokens=request.prompt_tokens, tag_tokens=tokens)


def _scored(policy: Policy, looked: Candidates, group: ModelInstances) -> tuple[list[Candidate], Unranked]:
    """Rank by what is at hand; the best of them, best first, and the rest."""
    if not len(looked):
        return [], unranked_of(looked)
    scores = policy.scores(looked)
    columns = {name: looked[name] for name in policy.needs}
    ranked = []
    admits = policy.admits(looked)
    order = policy.order(looked, scores)
    if policy.holds:
        order = order[(~admits[order]).argsort(kind="stable")]  # those first that admit it
    for place in order[:MOST_RANKED].tolist():
        candidate = group.sidecars[looked.instance_id(place)].as_known(
            CandidateStatus.UNASKED if policy.is_blind else CandidateStatus.INDICATORS
        )
        candidate.score, candidate.admits = float(scores[place]), bool(admits[place])
        candidate.read = {name: float(column[place]) for name, column in columns.items()}
        ranked.append(candidate)
    return ranked, unranked_of(looked, scores, columns) if len(looked) > len(ranked) else unranked_of(looked)
