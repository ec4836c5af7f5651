"""The condition of instances, from their sidecars."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.provisioner_server.roster import Member
from services.rpc.channels import open_channel
from services.security.own_key import NO_OWN_KEY, OwnKey

TIMEOUT_S = 2.0
PROBE = common_pb2.Request(
    request_id="step-time-probe", prompt_tokens=16, output_tokens=8, max_tokens=8, ignore_eos=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Whether an instance serves, and its number of requests; None where its sidecar does not respond.

    `alone_step_s` is the predicted duration of a step that decodes one request, where nothing else runs; else that of
    the steps there, which is not below it. NaN where it is unknown.
    """

    is_ready: bool = False
    num_requests: int | None = None
    least_tpot_slo_s: float = math.inf
    alone_step_s: float = math.nan


class Sidecars:
    """Connections to sidecars, kept until `forget`."""

    def __init__(self, key: OwnKey = NO_OWN_KEY) -> None:
        """Start without connections; all calls show `key`, if there is one."""
        self._key = key
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def conditions(self, members: Sequence[Member], *, with_step: bool = False) -> dict[str, Condition]:
        """Call all sidecars at the same time."""
        reachable = [member for member in members if member.has_address]
        answers = await asyncio.gather(*(self._call(member, with_step=with_step) for member in reachable))
        return {member.instance_id: answer for member, answer in zip(reachable, answers, strict=True)}

    async def _call(self, member: Member, *, with_step: bool) -> Condition:
        channel = self._channels.get(member.sidecar_address)
        if channel is None:
            channel = self._channels[member.sidecar_address] = open_channel(member.sidecar_address, self._key)
        probe = [PROBE] if with_step else []
        request = predictor_pb2.PredictRequest(instance_id=member.instance_id, requests=probe)
        try:
            answer = await predictor_pb2_grpc.PredictorStub(channel).Predict(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return Condition()
        is_ready = answer.state == common_pb2.INSTANCE_STATE_READY
        if not answer.HasField("indicators"):
            return Condition(is_ready=is_ready)
        indicators = answer.indicators
        num = indicators.num_running + indicators.num_waiting + indicators.num_reserved
        step_s = indicators.decode_step_s if num and indicators.decode_step_s > 0 else math.nan
        forecasts = [one.forecast.tpot_s for one in answer.predictions if one.HasField("forecast")]
        return Condition(
            is_ready=is_ready,
            num_requests=num,
            least_tpot_slo_s=indicators.least_tpot_slo_s if indicators.HasField("least_tpot_slo_s") else math.inf,
            alone_step_s=forecasts[0] if forecasts and num == 0 else step_s,
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
