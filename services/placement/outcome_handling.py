"""The end of requests: outcomes are learned from, and reservations are released at sidecars."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from protos.block.v1 import common_pb2
from scheduler.core import SchedulerCore
from scheduler.instances import PREFILL_ROLE
from services.placement.decision_log import DecisionLog
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry
from services.placement.listeners import COMPLETED, PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.rpc.messages import require_name

OUTCOME_TIMES = ("ttft_s", "e2e_s", "tpot_s", "queue_s", "prefill_s", "hand_over_s")


class OutcomeHandler:
    """Takes the ends of requests from clients, and passes them to sidecars, listeners and the decision core."""

    def __init__(
        self,
        registry: InstanceRegistry,
        core: SchedulerCore,
        decision_log: DecisionLog,
        listeners: Sequence[PlacementListener],
        metrics: SchedulerMetrics,
    ) -> None:
        """Handle the requests that a driver places on the instances of a registry."""
        self._registry = registry
        self._core = core
        self._decision_log = decision_log
        self._listeners = listeners
        self._metrics = metrics

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Pass the end of a request on to its instance's sidecar, and its outcome to the listeners."""
        require_name("request_id", request.request_id)
        require_name("instance_id", request.instance_id)
        if request.HasField("outcome"):
            outcome = request.outcome
            require_outcome(outcome)
            outcome.request_id, outcome.instance_id = request.request_id, request.instance_id
            self._learn(outcome)
        handle = self._registry.find(request.instance_id)
        is_prefill = handle is not None and handle.instance.role == PREFILL_ROLE
        goes_on = is_prefill and not self._decision_log.is_answered_by(request.instance_id, request.request_id)
        if not (goes_on or request.HasField("outcome")):
            for listener in self._listeners:
                listener.on_release(request.request_id, request.instance_id)
        if handle is None:  # it was removed meanwhile
            self._metrics.releases.labels("unknown_instance").inc()
            return common_pb2.ReleaseResponse()
        return await self._release(handle, request)

    def ended(self, outcome: common_pb2.Outcome) -> None:
        """Learn from the outcome of a request that was streamed here, and release it in the background."""
        self._learn(outcome)
        handle = self._registry.find(outcome.instance_id)
        if handle is None:  # it was removed meanwhile
            self._metrics.releases.labels("unknown_instance").inc()
            return
        request = common_pb2.ReleaseRequest(
            request_id=outcome.request_id, instance_id=outcome.instance_id, outcome=outcome
        )
        handle.start(self._release(handle, request))

    def _learn(self, outcome: common_pb2.Outcome) -> None:
        directory = self._registry.directory
        if outcome.finish_reason == common_pb2.FINISH_REASON_FAILED:
            directory.engine_failed(outcome.instance_id, time.monotonic())
        elif outcome.finish_reason in COMPLETED:
            directory.engine_succeeded(outcome.instance_id)
        if outcome.instance_id == outcome.prefill_instance_id:  # only the prefill leg has ended
            return
        if outcome.HasField("hand_over_s"):
            self._core.observe_hand_over(outcome.hand_over_s)
        for listener in self._listeners:
            listener.on_outcome(outcome)

    async def _release(self, handle: InstanceHandle, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        response = await handle.release(request)
        self._metrics.releases.labels("yes" if response.released else "no").inc()
        return response


def require_outcome(outcome: common_pb2.Outcome) -> None:
    """Refuse times that are invalid."""
    for name in OUTCOME_TIMES:
        value = getattr(outcome, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"outcome.{name}: must be a time from 0 on, not {value}")
