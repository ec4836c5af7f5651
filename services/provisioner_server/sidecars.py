"""The condition of instances, from their sidecars."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.provisioner_server.roster import Member
from services.rpc.channels import open_channel

TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether an instance serves, and its number of requests; None where its sidecar does not respond."""

    is_ready: bool = False
    num_requests: int | None = None


class Sidecars:
    """Connections to sidecars, kept until `forget`."""

    def __init__(self) -> None:
        """Start without connections."""
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def conditions(self, members: Sequence[Member]) -> dict[str, Condition]:
        """Call all sidecars at the same time."""
        reachable = [member for member in members if member.has_address]
        answers = await asyncio.gather(*(self._call(member) for member in reachable))
        return {member.instance_id: answer for member, answer in zip(reachable, answers, strict=True)}

    async def _call(self, member: Member) -> Condition:
        channel = self._channels.get(member.sidecar_address)
        if channel is None:
            channel = self._channels[member.sidecar_address] = open_channel(member.sidecar_address)
        request = predictor_pb2.PredictRequest(instance_id=member.instance_id)
        try:
            answer = await predictor_pb2_grpc.PredictorStub(channel).Predict(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return Condition()
        indicators = answer.indicators
        return Condition(
            is_ready=answer.state == common_pb2.INSTANCE_STATE_READY,
            num_requests=indicators.num_running + indicators.num_waiting + indicators.num_reserved
            if answer.HasField("indicators")
            else None,
        )

    async def forget(self, *addresses: str) -> None:
        """Close connections that are no longer needed."""
        for address in addresses:
            channel = self._channels.pop(address, None)
            if channel is not None:
                await channel.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.forget(*list(self._channels))
