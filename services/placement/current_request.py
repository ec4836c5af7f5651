"""The request that Generate places and sends next: the client's, or one for the rest of an answer."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.placement import Placement
from services.http.continued_request import EarlierPart, continued_request
from services.http.openai_body import OpenAIRequest
from services.http.prefill_leg import HeldBlocks
from services.http.stream_continuation import Continuation
from services.placement.driver import PlacementDriver
from services.placement.generation_spans import GenerationSpans
from services.placement.generation_tracker import GenerationTracker
from services.placement.upstream_engine import EngineRequest
from services.rpc.errors import BusyError, UnknownNameError
from services.rpc.objectives import with_objective

NOT_PLACED = (ConnectionError, ValueError, TimeoutError, UnknownNameError, BusyError)  # errors of decisions


@dataclass(slots=True, kw_only=True)
class CurrentRequest:
    """A request between attempts: excluded instances, held KV blocks, and the part of its answer so far."""

    driver: PlacementDriver
    spans: GenerationSpans
    engine_request: EngineRequest
    ask: OpenAIRequest  # `engine_request`, as placing reads it
    message: scheduler_pb2.GenerateRequest
    arrived_s: float  # monotonic
    waited_s: float  # before `arrived_s`
    excluded: frozenset[str] = frozenset()
    held: HeldBlocks | None = None  # by the instance of a prefill leg, not fetched yet
    undivided: bool = field(init=False)  # one engine serves it
    earlier: EarlierPart | None = None  # of the answer, from engines that it has left
    num_migrations: int = 0
    to_send: EngineRequest = field(init=False)  # with the facts of the request as the last decision has them

    def __post_init__(self) -> None:
        """Divide the request into two legs only where its body allows that."""
        self.undivided = self.ask.undivided

    async def place(self) -> tuple[Placement, common_pb2.Decision]:
        """Find another decode instance while KV blocks are held; otherwise, place the request again."""
        if self.held is not None:
            try:
                placement, decision = await self._placed(common_pb2.LEG_DECODE)
            except NOT_PLACED:
                pass  # no other one, or none that serves such a request
            else:
                if self.held.may_be_fetched(time.monotonic(), self.driver.settings.hand_over_deadline_s):
                    return placement, decision
                await self.release(placement, None)
            self.held = None
        return await self._placed(common_pb2.LEG_SERVE if self.undivided else common_pb2.LEG_UNSPECIFIED)

    async def _placed(self, leg: common_pb2.Leg.ValueType) -> tuple[Placement, common_pb2.Decision]:
        message, request = self.message, self.message.request
        request.waited_s, request.leg, request.in_s = self.waited_s, leg, 0.0
        request.ClearField("held_s")
        placement, decision = await self.spans.request.scheduled(
            self.driver.place(
                request,
                prompt=self.engine_request.prompt,
                policy=message.policy,
                excluded=self.excluded,
                explain=message.explain,
                arrived_s=self.arrived_s,
            )
        )
        facts = with_objective(request, decision.objective) if decision.HasField("objective") else request
        waited_s = self.waited_s + time.monotonic() - self.arrived_s
        self.to_send = self.engine_request.with_facts(
            facts,
            waited_s,
            is_demoted=decision.demoted,
            passes_priority=self.driver.settings.pass_objective_priority,
        )
        return placement, decision

    async def release(self, placement: Placement, outcome: common_pb2.Outcome | None) -> None:
        """End the reservation of a placement."""
        await self.driver.outcomes.release(
            common_pb2.ReleaseRequest(
                request_id=self.message.request.request_id, instance_id=placement.instance_id, outcome=outcome
            )
        )

    def continue_as(self, rest: Continuation, tracker: GenerationTracker, num_tokens: int) -> None:
        """Replace the request by that for the rest of its answer; the client has `num_tokens` of it."""
        now_s, decision = time.monotonic(), tracker.decision
        self.num_migrations += 1
        whole = self.whole(tracker.outcome())
        self.earlier = EarlierPart(
            arrived_s=tracker.entered_s if self.earlier is None else self.earlier.arrived_s,
            ttft_s=whole.ttft_s if whole.HasField("ttft_s") else None,
            prompt_tokens=whole.prompt_tokens,
            num_tokens=num_tokens,
        )
        request = continued_request(
            self.message.request,
            rest,
            number=self.num_migrations,
            elapsed_s=now_s - tracker.entered_s,
            tag=decision.tag if decision.HasField("tag") else None,
        )
        self.message = scheduler_pb2.GenerateRequest(
            request=request, policy=self.message.policy, explain=self.message.explain
        )
        self.engine_request = EngineRequest(
            path=rest.path,
            body=json.loads(rest.body),
            request_id=request.request_id,
            prompt=b"",
            output_tokens=self.engine_request.output_tokens,
        )
        self.ask = self.engine_request.read()
        self.undivided, self.held = self.ask.undivided, None
        self.arrived_s, self.waited_s = now_s, 0.0

    def whole(self, outcome: common_pb2.Outcome) -> common_pb2.Outcome:
        """Return the outcome of the whole answer by that of its last engine."""
        return outcome if self.earlier is None else self.earlier.whole(outcome, self.arrived_s - self.waited_s)
