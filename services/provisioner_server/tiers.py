"""Moves of instances between tiers: planned by what sidecars report, and written into the roster."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence

from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning.tier_planner import TierInstance, TierMove, TierPlace, shortest_step_s
from scheduler.provisioning.tiers import Tier, tier_for
from services.logs import log_event
from services.provisioner_server.metrics import ProvisionerMetrics
from services.provisioner_server.pool import Pool
from services.provisioner_server.roster import READY, Member, Roster
from services.provisioner_server.sidecars import Condition, Sidecars

log = logging.getLogger(__name__)


class TierMoves:
    """Plans the moves of one pool; the roster has the place of each instance, and nothing else has it."""

    def __init__(self, pool: Pool) -> None:
        """Know no step time yet."""
        self._pool = pool
        self._by_name = {tier.name: tier for tier in pool.tiers}
        self._alone_step_s: dict[str, float] = {}  # by instance, of those that are ready
        self._busy: set[str] = set()  # instances that had requests, and whose step time is known
        self._shortest_step_s = math.nan  # of the instances that decode
        self._unservable: set[str] = set()  # tiers whose bound no instance keeps

    async def plan(self, roster: Roster, sidecars: Sidecars) -> Sequence[TierMove]:
        """Ask all ready instances for their requests, and return the moves that are to be made."""
        members = roster.in_state(READY)
        known = [member for member in members if member.instance_id in self._busy]
        others = [member for member in members if member.instance_id not in self._busy]
        busy, rest = await asyncio.gather(sidecars.conditions(known), sidecars.conditions(others, with_step=True))
        conditions = busy | rest
        self._alone_step_s = {
            member.instance_id: self._step_s(member, conditions.get(member.instance_id, Condition()))
            for member in members
        }
        self._busy = {
            name
            for name, condition in conditions.items()
            if condition.num_requests and not math.isnan(self._alone_step_s[name])
        }
        instances = [self._instance(member, conditions.get(member.instance_id, Condition())) for member in members]
        self._note_shortest_step(shortest_step_s(instances))
        return self._pool.plan_tiers(instances).moves

    def _note_shortest_step(self, step_s: float) -> None:
        """Log once for each tier whose bound no instance can keep."""
        self._shortest_step_s = step_s
        unservable = {tier.name for tier in self._pool.tiers if step_s > tier.tpot_slo_s}
        for name in sorted(unservable - self._unservable):
            log_event(
                log, logging.WARNING, "no instance can keep the bound of a tier", tier=name,
                tpot_slo_s=self._by_name[name].tpot_slo_s, shortest_step_s=round(step_s, 6),
            )  # fmt: skip
        self._unservable = unservable

    def _step_s(self, member: Member, condition: Condition) -> float:
        """Return the duration of a step that decodes one request: exact where nothing else runs, else a bound of it."""
        known_s, new_s = self._alone_step_s.get(member.instance_id, math.nan), condition.alone_step_s
        if math.isnan(new_s):
            return known_s
        if condition.num_requests == 0 or math.isnan(known_s):
            return new_s
        return min(known_s, new_s)

    def _instance(self, member: Member, condition: Condition) -> TierInstance:
        return TierInstance(
            instance_id=member.instance_id,
            place=TierPlace(member.tier, member.tier_closed),
            num_requests=condition.num_requests,
            least_tpot_slo_s=condition.least_tpot_slo_s,
            alone_step_s=self._alone_step_s[member.instance_id],
            role=member.role,
        )

    def apply(self, roster: Roster, moves: Sequence[pb.TierMove]) -> None:
        """Write the moves into the roster, all at once; a move that was made already changes nothing."""
        roster.place(
            {
                move.instance_id: (move.tier, tier.tpot_slo_s if tier is not None else 0.0, move.closed)
                for move in moves
                for tier in [self._by_name.get(move.tier)]
                if tier is not None or not move.tier  # one of a tier that is gone is planned again
            }
        )

    def refresh(self, roster: Roster) -> None:
        """Take the tiers as they are configured now: their bounds may have changed, and some may be gone."""
        changed = {}
        for member in roster:
            tier = self._by_name.get(member.tier)
            place = ("", 0.0, False) if tier is None else (tier.name, tier.tpot_slo_s, member.tier_closed)
            if place != (member.tier, member.tier_tpot_s, member.tier_closed):
                changed[member.instance_id] = place
        if changed:
            roster.place(changed)

    def status(self, roster: Roster) -> list[pb.TierStatus]:
        """Return the tiers with their numbers of instances and of waiting requests."""
        waiting = self._pool.waiting_targets()
        members = roster.in_state(READY)
        return [
            pb.TierStatus(
                name=tier.name,
                tpot_slo_s=tier.tpot_slo_s,
                num_instances=_num_at(members, TierPlace(tier.name)),
                num_pending=_num_at(members, TierPlace(tier.name, closed=True)),
                min_instances=tier.min_instances,
                max_instances=tier.max_instances,
                num_waiting=sum(num for target_s, num in waiting.items() if self._is_of(target_s, tier)),
                shortest_step_s=None if math.isnan(self._shortest_step_s) else self._shortest_step_s,
            )
            for tier in self._pool.tiers
        ]

    def _is_of(self, target_s: float, tier: Tier) -> bool:
        return tier_for(target_s, self._pool.tiers) is tier

    def measure(self, roster: Roster, metrics: ProvisionerMetrics) -> None:
        """Set the metrics of the tiers."""
        if not self._pool.tiers:
            return
        pool, members = self._pool.settings.pool, roster.in_state(READY)
        for one in self.status(roster):
            metrics.tier_instances.labels(pool, one.name, "no").set(one.num_instances)
            metrics.tier_instances.labels(pool, one.name, "yes").set(one.num_pending)
            metrics.tier_waiting.labels(pool, one.name).set(one.num_waiting)
        metrics.tier_instances.labels(pool, "", "no").set(sum(not member.tier for member in members))


def action_from(moves: Sequence[TierMove], action_id: str, pool: Pool, num_present: int) -> pb.Action:
    """Convert moves to one action, which is carried out as a whole."""
    settings = pool.settings
    return pb.Action(
        action_id=action_id,
        kind=pb.ACTION_KIND_MOVE,
        pool=settings.pool,
        model=settings.model,
        instance_ids=[move.instance_id for move in moves],
        num_desired=num_present,
        num_present=num_present,
        rule="tiers",
        why="; ".join(f"{move.instance_id} to {described(move.place)}: {move.why}" for move in moves),
        decided_unix_s=time.time(),
        dry_run=settings.dry_run,
        moves=[
            pb.TierMove(instance_id=move.instance_id, tier=move.place.tier, closed=move.place.closed, why=move.why)
            for move in moves
        ],
    )


def described(place: TierPlace) -> str:
    """Name a place, for people."""
    if not place.tier:
        return "the closed pool" if place.closed else "the pool"
    return f"pending for {place.tier}" if place.closed else place.tier


def _num_at(members: Sequence[Member], place: TierPlace) -> int:
    return sum(TierPlace(member.tier, member.tier_closed) == place for member in members)
