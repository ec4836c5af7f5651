"""Reserves requests at sidecars, and releases them where the decision does not use a reservation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate import CandidateStatus
from scheduler.decision import Decision
from scheduler.intentions import Intention, Release, Reserve
from services.instances.instance import REMOVED_FROM_LIST
from services.placement.instance_handle import InstanceHandle, ReserveError
from services.placement.instance_registry import InstanceRegistry
from services.placement.metrics import SchedulerMetrics
from services.placement.replies import conflict_of, refusal_of
from services.placement.request_conversion import set_leg, set_waited
from services.placement.settings import MAX_RESERVATION_S, SchedulerSettings
from services.rpc.messages import forecast_message

RESERVE_RESULTS = {
    predictor_pb2.RESERVE_RESULT_RESERVED: "reserved",
    predictor_pb2.RESERVE_RESULT_EXTENDED: "extended",
    predictor_pb2.RESERVE_RESULT_CONFLICT: "conflict",
    predictor_pb2.RESERVE_RESULT_REFUSED: "refused",
}


class SidecarReservations:
    """Carries out the intentions `Reserve` and `Release` of decisions."""

    def __init__(self, registry: InstanceRegistry, settings: SchedulerSettings, metrics: SchedulerMetrics) -> None:
        """Reserve at the instances of a registry."""
        self._registry = registry
        self._settings = settings
        self._metrics = metrics

    async def reserve(
        self,
        intention: Reserve,
        decision: Decision,
        request: common_pb2.Request,
        handles: dict[str, InstanceHandle],
    ) -> Intention:
        """Reserve at an instance, and pass the reply to the decision; return the decision's next intention."""
        handle = self._registry.find(intention.instance_id)
        if handle is None:
            return decision.reservation_failed(CandidateStatus.DOWN, REMOVED_FROM_LIST, time.monotonic())
        handles[handle.name] = handle
        message = self._message(intention, decision, request)
        try:
            response = await handle.reserve(message)
        except ReserveError as error:
            self._metrics.reserves.labels(error.status.value).inc()
            return decision.reservation_failed(error.status, error.note, time.monotonic())
        self._metrics.reserves.labels(RESERVE_RESULTS.get(response.result, "other")).inc()
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT:
            return decision.conflict(conflict_of(response, request.request_id), time.monotonic())
        if response.result == predictor_pb2.RESERVE_RESULT_REFUSED:
            status, note = refusal_of(response)
            return decision.reservation_failed(status, note, time.monotonic(), counts=False)
        return decision.reserved(response.expires_in_s, time.monotonic())

    def _message(
        self, intention: Reserve, decision: Decision, request: common_pb2.Request
    ) -> predictor_pb2.ReserveRequest:
        """Return the message of a reservation, after setting the leg and its times in `request`."""
        set_leg(request, intention)
        set_waited(request, decision.request, time.monotonic(), self._settings.deadline_margin_s)
        request.in_s = min(request.in_s, MAX_RESERVATION_S)  # sidecars accept no more
        return predictor_pb2.ReserveRequest(
            request=request,
            ttl_s=self._settings.reservation_s,  # from the request's arrival
            holder=self._settings.scheduler_id,
            forecast=None if intention.forecast is None else forecast_message(intention.forecast),
            policy=decision.policy.text,
            instance_id=intention.instance_id,
            if_version=intention.if_version,
            if_epoch=intention.if_epoch,
        )

    async def give_back(
        self, intention: Release, decision: Decision, handles: Mapping[str, InstanceHandle]
    ) -> Intention:
        """Release a reservation; a call without a reply by the deadline goes on in the background."""
        name = intention.instance_id
        message = common_pb2.ReleaseRequest(request_id=decision.request.request_id, instance_id=name)
        releasing = handles[name].start(handles[name].release(message))
        await asyncio.wait([releasing], timeout=self._settings.sidecar_deadline_s)
        confirmed = releasing.done() and releasing.result().released
        return decision.released(time.monotonic(), confirmed=confirmed)
