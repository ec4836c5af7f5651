"""block.v1.Provisioner: reports of schedulers, status, plan, history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.block.v1 import common_pb2, provisioner_pb2_grpc
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning.planner import NOTHING
from services.provisioner_server.journal import OPEN, JournalEntry, entries
from services.provisioner_server.leader import Leader
from services.provisioner_server.pool import Pool
from services.provisioner_server.roster import DRAINING, READY, STARTING, Member
from services.rpc.errors import UnknownNameError

Context = grpc.aio.ServicerContext[Any, Any]

FOLLOW_S = 0.5
STATES = {
    STARTING: common_pb2.INSTANCE_STATE_STARTING,
    READY: common_pb2.INSTANCE_STATE_READY,
    DRAINING: common_pb2.INSTANCE_STATE_DRAINING,
}


class ProvisionerService(provisioner_pb2_grpc.ProvisionerServicer):
    """Every provisioner receives reports and replies; only the leader acts."""

    def __init__(self, pool: Pool, leader: Leader) -> None:
        """Serve one pool."""
        self._pool, self._leader = pool, leader

    async def Report(self, request_iterator: AsyncIterator[pb.ReportRequest], context: Context) -> pb.ReportResponse:
        """Receive the reports of a scheduler until it ends the stream."""
        num_taken = 0
        async for report in request_iterator:
            num_taken += self._pool.receive(report)
        return pb.ReportResponse(num_taken=num_taken)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Return the instances, their desired number, and the actions under way."""
        self._require_pool(request.pool)
        settings, roster = self._pool.settings, self._leader.roster()
        now = self._pool.state(len(roster.in_state(READY)), len(roster.in_state(STARTING)))
        latest = {entry.action.action_id: entry.action for entry in entries(self._leader.journal_path)}
        under_way = [action for action in latest.values() if action.state in OPEN]
        decision = self._leader.decide()
        status = pb.PoolStatus(
            pool=settings.pool,
            rule=settings.rule,
            instances=[instance_message(member) for member in roster],
            num_desired=decision.num_desired,
            min_instances=settings.limits.min_instances,
            max_instances=settings.limits.max_instances,
            arrivals_per_s=now.trend.level_per_s,
            forecast_p99_e2e_s=now.forecast_p_s,
            cold_start_s=now.cold_start_s if self._pool.history.cold_starts.num_measured else 0.0,
            under_way=under_way,
            cooldown_left_s=self._pool.cooldown_left_s(),
            tiers=self._leader.tiers.status(roster),
        )
        return pb.StatusResponse(
            pools=[status], leader_id=await self._leader.holder(), provisioner_id=settings.provisioner_id
        )

    async def Plan(self, request: pb.PlanRequest, context: Context) -> pb.PlanResponse:
        """Return what would be done now, without doing it."""
        self._require_pool(request.pool)
        decision = self._leader.decide(request.rule)
        actions = [] if decision.kind == NOTHING else [self._leader.action_from(decision, "", request.rule)]
        return pb.PlanResponse(actions=actions, why=decision.why, numbers=decision.numbers)

    async def History(self, request: pb.HistoryRequest, context: Context) -> AsyncIterator[pb.HistoryResponse]:
        """Return past actions, oldest first, and then new ones where `follow` is set."""
        self._require_pool(request.pool)
        known = entries(self._leader.journal_path)
        wanted = [entry for entry in known if entry.at_unix_s >= request.since_unix_s]
        for entry in wanted[-request.most :] if request.most else wanted:
            yield history_message(entry)
        while request.follow:
            await asyncio.sleep(FOLLOW_S)
            now = entries(self._leader.journal_path)
            for entry in now[len(known) :]:
                yield history_message(entry)
            known = now

    def _require_pool(self, pool: str) -> None:
        if pool not in ("", self._pool.settings.pool):
            raise UnknownNameError(f"pool: {pool!r} is not served here; {self._pool.settings.pool!r} is")


def instance_message(member: Member) -> common_pb2.Instance:
    """Write an instance as a message."""
    return common_pb2.Instance(
        instance_id=member.instance_id,
        engine_url=member.engine_url,
        sidecar_address=member.sidecar_address,
        models=member.models,
        state=STATES[member.state],
        role=member.role,
        tier=member.tier,
        tier_tpot_s=member.tier_tpot_s or None,
        tier_closed=member.tier_closed,
    )


def history_message(entry: JournalEntry) -> pb.HistoryResponse:
    """Write an entry of the journal as a message."""
    return pb.HistoryResponse(action=entry.action, at_unix_s=entry.at_unix_s)
