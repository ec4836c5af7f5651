"""What a provisioner does, for the live page: its pools, its plan, and its last actions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc

from protos.block.v1 import common_pb2, provisioner_pb2, provisioner_pb2_grpc
from services.placement.tail_records import number
from services.rpc.channels import open_channel
from services.security.own_key import NO_OWN_KEY, OwnKey

POLL_S = 2.0
WITHIN_S = 2.0
MAX_ACTIONS = 20
MAX_TEXT = 300


class ProvisionerWatch:
    """Asks provisioners, one after the other until one replies, while it is followed."""

    def __init__(self, addresses: Sequence[str], key: OwnKey = NO_OWN_KEY) -> None:
        """Ask at some addresses; without any there is nothing to tell."""
        self._addresses, self._key = addresses, key
        self.record: dict[str, Any] | None = None

    async def follow(self) -> None:
        """Keep the record up to date until cancelled."""
        channels = [open_channel(address, self._key) for address in self._addresses]
        try:
            while channels:
                self.record = await _first_reply(channels)
                await asyncio.sleep(POLL_S)
        finally:
            self.record = None
            for channel in channels:
                await channel.close()


async def _first_reply(channels: Sequence[grpc.aio.Channel]) -> dict[str, Any]:
    reason = ""
    for channel in channels:
        stub = provisioner_pb2_grpc.ProvisionerStub(channel)
        try:
            status = await stub.Status(provisioner_pb2.StatusRequest(), timeout=WITHIN_S)
            plan = await stub.Plan(provisioner_pb2.PlanRequest(), timeout=WITHIN_S)
            request = provisioner_pb2.HistoryRequest(most=MAX_ACTIONS)
            entries = [entry async for entry in stub.History(request, timeout=WITHIN_S)]
        except grpc.aio.AioRpcError as error:
            reason = (error.details() or error.code().name)[:MAX_TEXT]
            continue
        planned = [_action(action, 0.0, "planned now") for action in plan.actions]
        taken = [_action(entry.action, entry.at_unix_s) for entry in reversed(entries)]
        return {"pools": [_pool(pool) for pool in status.pools], "actions": [*planned, *taken]}
    return {"error": f"no provisioner replies: {reason}", "pools": [], "actions": []}


def _pool(pool: provisioner_pb2.PoolStatus) -> dict[str, Any]:
    states = Counter(_word(common_pb2.InstanceState.Name(one.state), "INSTANCE_STATE_") for one in pool.instances)
    return {
        "pool": pool.pool,
        "rule": pool.rule,
        "desired": pool.num_desired,
        "min": pool.min_instances,
        "max": pool.max_instances,
        **{name: states[name] for name in ("starting", "ready", "draining")},
        "forecast_p99_s": number(pool.forecast_p99_e2e_s),
        "cold_start_s": number(pool.cold_start_s) or None,
    }


def _action(action: provisioner_pb2.Action, at_unix_s: float, state: str = "") -> dict[str, Any]:
    return {
        "at": at_unix_s or None,
        "kind": _word(provisioner_pb2.ActionKind.Name(action.kind), "ACTION_KIND_"),
        "state": state or _word(provisioner_pb2.ActionState.Name(action.state), "ACTION_STATE_"),
        "num": len(action.instance_ids) or len(action.moves) or action.num_instances,
        "why": action.why[:MAX_TEXT],
    }


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
