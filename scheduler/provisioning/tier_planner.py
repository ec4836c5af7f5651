"""Moves instances between tiers and the best-effort pool (PolyServe §4.3 and §4.4).

A request belongs to the loosest tier that keeps its target for the time per token. An instance is in the pool, in a
tier, or pending: it has left its tier, and finishes the requests of looser tiers that it has. Schedulers put requests
on idle instances of the pool at once; such an instance joins the tier of its strictest request.

Tiers bound the time per token, so only instances that decode belong to one: those with the role prefill stay in the
open pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.instances import BOTH, PREFILL_ROLE
from scheduler.provisioning.pool_state import TierNeeds
from scheduler.provisioning.tiers import SAME, Tier, Tiers, tier_for


class TierPlace(NamedTuple):
    """The tier of an instance, or the pool; whether it is open or closed.

    An open instance takes requests of its tier and looser ones; in the pool it takes any request. A closed instance
    with a tier is pending: it takes only requests of this tier, which is that of its strictest request. A closed
    instance of the pool takes no request with a target for the time per token.
    """

    tier: str = ""  # empty: the pool
    closed: bool = False


POOL, CLOSED_POOL = TierPlace(), TierPlace(closed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInstance:
    """A ready instance, with what its sidecar reports; `num_requests` is None where it does not respond."""

    instance_id: str
    place: TierPlace = POOL
    num_requests: int | None = None
    least_tpot_slo_s: float = math.inf  # the strictest target there
    alone_step_s: float = math.nan  # of a step that decodes one request; NaN: unknown
    role: str = BOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMove:
    """One instance changes its place."""

    instance_id: str
    place: TierPlace
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """The moves of a moment, and the places after them."""

    moves: tuple[TierMove, ...] = ()
    places: Mapping[str, TierPlace] = field(default_factory=dict)
    needs: TierNeeds = field(default_factory=TierNeeds)


class TierPlanner:
    """Plans the moves of one pool. Its state between plans only delays moves, and may be lost without harm.

    An instance leaves a tier only after `hold_s` in it, and after the tier has not needed it for `hold_s`. After an
    instance joined a tier for waiting requests, no other one does so for `settle_s`: schedulers learn of it later.
    """

    def __init__(self, tiers: Tiers, *, hold_s: float = 5.0, settle_s: float = 3.0) -> None:
        """Start without a history."""
        self.tiers = tiers
        self._hold_s, self._settle_s = hold_s, settle_s
        self._since: dict[str, tuple[TierPlace, float]] = {}  # by instance: its place, since when
        self._unneeded_since_s: dict[str, float] = {}  # by instance, of those that their tier does not need
        self._fewest: dict[str, int] = {}  # by pending instance: the fewest requests; more now means that one is new
        self._joined_s: dict[str, float] = {}  # by tier: when an instance joined it for waiting requests

    def plan(self, now_s: float, instances: Sequence[TierInstance], waiting: Mapping[float, int]) -> TierPlan:
        """Return the moves now; `waiting` has the numbers of waiting requests by their targets."""
        assignments = _Assignments(self.tiers, instances)
        self._observe(now_s, assignments)
        self._join_by_requests(assignments)
        for tier in self.tiers:
            self._enforce_maximum(assignments, tier)
        num_unmet = sum(self._fill(assignments, tier) for tier in self.tiers)
        demand = _by_tier(waiting, self.tiers)
        for tier in self.tiers:
            num_unmet += bool(demand.get(tier.name)) and self._grow(now_s, assignments, tier)
        for tier in self.tiers:
            self._shrink(now_s, assignments, tier, is_wanted=bool(demand.get(tier.name)))
        self._place_rest(assignments)
        idle = tuple(
            one.instance_id for one in assignments.live if not assignments.place(one).tier and one.num_requests == 0
        )
        needs = TierNeeds(num_unmet=num_unmet, idle=idle)
        return TierPlan(moves=assignments.moves(), places=assignments.places, needs=needs)

    def _observe(self, now_s: float, assignments: _Assignments) -> None:
        """Note since when each instance is at its place, and since when its tier does not need it."""
        since, unneeded, fewest = self._since, self._unneeded_since_s, self._fewest
        self._since, self._unneeded_since_s, self._fewest = {}, {}, {}
        for one in assignments.all:
            name, place = one.instance_id, assignments.place(one)
            known = since.get(name)
            at = known if known is not None and known[0] == place else (place, now_s)
            self._since[name] = at
            tier = assignments.by_name.get(place.tier)
            if one.num_requests is None or tier is None:
                continue
            if place.closed:
                self._fewest[name] = min(one.num_requests, fewest.get(name, one.num_requests))
            elif not assignments.is_needed(one, tier):
                self._unneeded_since_s[name] = max(at[1], unneeded.get(name, now_s))

    def _join_by_requests(self, assignments: _Assignments) -> None:
        """Let instances join the tiers of the requests that schedulers have already placed there."""
        for one in assignments.live:
            place, tier = assignments.place(one), assignments.tier_held(one)
            if tier is None or (place.tier and not place.closed) or not assignments.has_room(tier):
                continue
            is_new = place == POOL or (place == TierPlace(tier.name, closed=True) and self._has_grown(one))
            if is_new and can_serve(one, tier):
                assignments.put(one, TierPlace(tier.name), f"has requests of {tier.name}")

    def _has_grown(self, one: TierInstance) -> bool:
        return one.num_requests is not None and one.num_requests > self._fewest.get(one.instance_id, one.num_requests)

    def _fill(self, assignments: _Assignments, tier: Tier) -> int:
        """Fill a tier up to its minimum; return how many instances are missing."""
        while (missing := tier.min_instances - assignments.num_in(tier)) > 0:
            chosen = assignments.candidate_for(tier)
            if chosen is None:
                return missing if assignments.may_be_served(tier) else 0
            assignments.put(chosen, TierPlace(tier.name), f"min_instances of {tier.name} is {tier.min_instances}")
        return 0

    def _grow(self, now_s: float, assignments: _Assignments, tier: Tier) -> bool:
        """Let one instance join a tier whose requests wait; return whether an instance is missing."""
        if not assignments.has_room(tier) or now_s - self._joined_s.get(tier.name, -math.inf) < self._settle_s:
            return False
        chosen = assignments.candidate_for(tier)
        if chosen is None:
            return assignments.may_be_served(tier)
        self._joined_s[tier.name] = now_s
        assignments.put(chosen, TierPlace(tier.name), f"requests of {tier.name} wait")
        return False

    def _enforce_maximum(self, assignments: _Assignments, tier: Tier) -> None:
        """Let the least loaded instances leave a tier until it has no more than its maximum."""
        while assignments.num_in(tier) > tier.max_instances:
            assignments.leave(assignments.members_of(tier)[0], f"max_instances of {tier.name} is {tier.max_instances}")

    def _shrink(self, now_s: float, assignments: _Assignments, tier: Tier, *, is_wanted: bool) -> None:
        """Let the least loaded instance leave a tier that does not need it."""
        if is_wanted or assignments.num_in(tier) <= tier.min_instances:
            return
        for one in assignments.members_of(tier):
            at = self._since[one.instance_id]
            unneeded_s = now_s - self._unneeded_since_s.get(one.instance_id, now_s)
            has_settled = at[0] == TierPlace(tier.name) and now_s - at[1] >= self._hold_s <= unneeded_s
            if has_settled and one.num_requests is not None and not assignments.is_needed(one, tier):
                assignments.leave(one, f"no request of {tier.name} for {unneeded_s:.0f} s")
                return

    def _place_rest(self, assignments: _Assignments) -> None:
        """Return pending instances to the pool once they are empty, and close the pool where a tier may not grow.

        An idle instance of an open pool would take the requests of any tier, also of one at its maximum.
        """
        pool = TierPlace(closed=any(not assignments.has_room(tier) for tier in self.tiers))
        for one in assignments.live:
            place, tier = assignments.place(one), assignments.tier_held(one)
            if place.tier and not place.closed:
                continue
            if tier is None:  # idle, or with requests that belong to no tier
                assignments.put(one, pool, "has no request of a tier")
            elif assignments.has_room(tier):
                is_pool = place == POOL or not can_serve(one, tier)
                assignments.put(one, pool if is_pool else TierPlace(tier.name, closed=True), f"finishes {tier.name}")
            else:
                assignments.put(one, CLOSED_POOL, f"max_instances of {tier.name} is {tier.max_instances}")


def can_serve(one: TierInstance, tier: Tier) -> bool:
    """Return whether an instance keeps the bound of a tier at least with one request; False where that is unknown.

    A full step may be longer than the bound: admission by forecasts knows it, and early tokens leave time for it.
    """
    return one.alone_step_s <= tier.tpot_slo_s


def shortest_step_s(instances: Iterable[TierInstance]) -> float:
    """Return the shortest step that decodes one request, of the instances that decode; NaN where none is known."""
    known = [one.alone_step_s for one in instances if one.role != PREFILL_ROLE and not math.isnan(one.alone_step_s)]
    return min(known, default=math.nan)


class _Assignments:
    """The places of all instances while a plan is made."""

    def __init__(self, tiers: Tiers, instances: Sequence[TierInstance]) -> None:
        self.by_name = {tier.name: tier for tier in tiers}
        self.all = sorted(instances, key=lambda one: one.instance_id)
        self.decoding = [one for one in self.all if one.role != PREFILL_ROLE]
        self.live = [one for one in self.decoding if one.num_requests is not None]  # others stay where they are
        self.places = dict.fromkeys((one.instance_id for one in self.all), POOL)
        self.places |= {one.instance_id: self._known(one.place) for one in self.decoding}
        self._tiers = tiers
        self._why: dict[str, str] = {}

    def _known(self, place: TierPlace) -> TierPlace:
        return place if not place.tier or place.tier in self.by_name else POOL

    def place(self, one: TierInstance) -> TierPlace:
        return self.places[one.instance_id]

    def put(self, one: TierInstance, place: TierPlace, why: str) -> None:
        if self.places[one.instance_id] != place:
            self.places[one.instance_id] = place
            self._why.setdefault(one.instance_id, why)

    def leave(self, one: TierInstance, why: str) -> None:
        """Take an instance out of its tier; `_place_rest` decides its next place."""
        self.put(one, CLOSED_POOL, why)

    def moves(self) -> tuple[TierMove, ...]:
        return tuple(
            TierMove(
                instance_id=one.instance_id,
                place=self.place(one),
                why=self._why.get(one.instance_id) or _why_in_pool(one),
            )
            for one in self.all
            if self.place(one) != one.place
        )

    def members_of(self, tier: Tier) -> list[TierInstance]:
        """Return the instances in a tier, the least loaded first; pending ones are in none."""
        found = [one for one in self.all if self.place(one) == TierPlace(tier.name)]
        return sorted(found, key=lambda one: (one.num_requests or 0, one.instance_id))

    def num_in(self, tier: Tier) -> int:
        return sum(place == TierPlace(tier.name) for place in self.places.values())

    def has_room(self, tier: Tier) -> bool:
        return self.num_in(tier) < tier.max_instances

    def tier_held(self, one: TierInstance) -> Tier | None:
        """Return the tier of the strictest request of an instance."""
        return tier_for(one.least_tpot_slo_s, self._tiers) if one.num_requests else None

    def is_needed(self, one: TierInstance, tier: Tier) -> bool:
        """Return whether an instance holds a request of its tier, or one that is stricter still."""
        if not one.num_requests or not math.isfinite(one.least_tpot_slo_s):
            return False
        held = tier_for(one.least_tpot_slo_s, self._tiers)
        return held is None or held.tpot_slo_s <= tier.tpot_slo_s

    def may_be_served(self, tier: Tier) -> bool:
        """Return whether one more instance like those there are could serve a tier."""
        shortest_s = shortest_step_s(self.decoding)
        return math.isnan(shortest_s) or shortest_s <= tier.tpot_slo_s

    def candidate_for(self, tier: Tier) -> TierInstance | None:
        """Return the instance that joins a tier: a pending one whose requests fit, else one of the pool.

        Of idle ones of the pool the slowest that serves the tier is chosen, so that fast ones are left for others.
        """
        found = [one for one in self.live if self._may_join(one, tier)]
        return min(found, key=lambda one: self._preference(one, tier), default=None)

    def _may_join(self, one: TierInstance, tier: Tier) -> bool:
        place = self.place(one)
        fits = not one.num_requests or one.least_tpot_slo_s * SAME >= tier.tpot_slo_s
        return (place.closed or not place.tier) and fits and can_serve(one, tier)

    def _preference(self, one: TierInstance, tier: Tier) -> tuple[int, int, float, str]:
        held, is_idle = self.tier_held(one), not one.num_requests
        kind = (held is tier, held is not None, is_idle, True).index(True)
        return kind, one.num_requests or 0, -one.alone_step_s, one.instance_id


def _why_in_pool(one: TierInstance) -> str:
    return "prefill instances belong to no tier" if one.role == PREFILL_ROLE else "its tier is gone"


def _by_tier(waiting: Mapping[float, int], tiers: Tiers) -> dict[str, int]:
    """Return how many requests of each tier wait."""
    found: dict[str, int] = {}
    for tpot_slo_s, num in waiting.items():
        tier = tier_for(tpot_slo_s, tiers)
        if tier is not None and num > 0:
            found[tier.name] = found.get(tier.name, 0) + num
    return found
