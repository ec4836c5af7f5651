"""Asking instances' sidecars how they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.provisioner_server.roster import Member
from services.rpc.channels import open_channel

ANSWER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether it serves, and how much it has under way; None where nobody answers."""

    is_ready: bool = False
    num_there: int | None = None


class Sidecars:
    """Connections to sidecars, kept as long as somebody asks for them."""

    def __init__(self) -> None:
        """Know none."""
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def conditions(self, members: Sequence[Member]) -> dict[str, Condition]:
        """Ask all at once."""
        asked = [member for member in members if member.has_address]
        answers = await asyncio.gather(*(self._ask(member) for member in asked))
        return {member.instance_id: answer for member, answer in zip(asked, answers, strict=True)}

    async def _ask(self, member: Member) -> Condition:
        channel = self._channels.get(member.sidecar_address)
        if channel is None:
            channel = self._channels[member.sidecar_address] = open_channel(member.sidecar_address)
        question = predictor_pb2.PredictRequest(instance_id=member.instance_id)
        try:
            answer = await predictor_pb2_grpc.PredictorStub(channel).Predict(question, timeout=ANSWER_S)
        except grpc.aio.AioRpcError:
            return Condition()
        shown = answer.indicators
        has = answer.HasField("indicators")
        return Condition(
            is_ready=answer.state == common_pb2.INSTANCE_STATE_READY,
            num_there=shown.num_running + shown.num_waiting + shown.num_reserved if has else None,
        )

    async def forget(self, *addresses: str) -> None:
        """Close connections that nobody needs any more."""
        for address in addresses:
            channel = self._channels.pop(address, None)
            if channel is not None:
                await channel.close()

    async def close(self) -> None:
        """Close all."""
        await self.forget(*list(self._channels))
