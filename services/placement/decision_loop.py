"""The loop that carries out the intentions of a decision on the wall clock."""

from __future__ import annotations

import time

from predictor.request import DECODE
from protos.block.v1 import common_pb2
from scheduler.core import SchedulerCore
from scheduler.decision import Decision
from scheduler.instances import OverloadedError, UnknownModelError
from scheduler.intentions import Ask, AskLegs, Intention, Placed, Release, Reserve, Shed, Wait
from scheduler.objectives import Objective
from scheduler.placement import Placement
from services.placement.admission_waits import AdmissionWaits
from services.placement.forecast_fan_out import ForecastFanOut
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry
from services.placement.metrics import SchedulerMetrics
from services.placement.request_conversion import set_leg, waited_s
from services.placement.settings import SchedulerSettings
from services.placement.sidecar_reservations import SidecarReservations
from services.rpc.errors import UnknownNameError
from services.rpc.objectives import set_objective


class DecisionLoop:
    """Drives decisions until their requests are placed or shed, any number at the same time."""

    def __init__(
        self, core: SchedulerCore, registry: InstanceRegistry, settings: SchedulerSettings, metrics: SchedulerMetrics
    ) -> None:
        """Carry out the decisions of a core among the instances of a registry."""
        self._registry = registry
        self._metrics = metrics
        self._waits = AdmissionWaits(core, metrics)
        self._fan_out = ForecastFanOut(registry, settings, metrics)
        self._reservations = SidecarReservations(registry, settings, metrics)

    async def drive(
        self, decision: Decision, request: common_pb2.Request, handles: dict[str, InstanceHandle]
    ) -> Placement:
        """Carry out a decision's intentions until the request is placed; raise the error of a request that is shed."""
        if self._registry.directory.suspects:
            self._registry.probe_suspects()
        asked = sent = decision.request.objective
        intention = decision.start(time.monotonic())
        try:
            while not isinstance(intention, Placed):
                self._waits.wake()
                if isinstance(intention, Shed):
                    raise self._shed(intention, asked)
                if decision.request.objective is not sent:  # the decision has demoted the request
                    sent = decision.request.objective
                    set_objective(request, sent)
                intention = await self._carried_out(intention, decision, request, handles)
        except BaseException:
            for name in decision.cancel(time.monotonic()):
                handles[name].forget(request.request_id)
            self._waits.end(decision, "left")
            raise
        finally:
            set_leg(request, decision.request)
            request.waited_s = waited_s(decision.request, time.monotonic())
            if sent is not asked:
                set_objective(request, asked)
            self._waits.wake()
        placement = decision.placement
        self._waits.end(decision, "admitted" if decision.is_admitted else "not_admitted")
        for leg in () if decision.request.dry_run else placement.legs:
            handle = self._registry.find(leg.instance_id) if leg.reserved_for_s is None else None
            if handle is not None:
                handle.sent_without_reservation(0 if leg.kind == DECODE else request.prompt_tokens)
        return placement

    async def _carried_out(
        self,
        intention: Ask | AskLegs | Reserve | Release | Wait,
        decision: Decision,
        request: common_pb2.Request,
        handles: dict[str, InstanceHandle],
    ) -> Intention:
        """Carry out an intention; return the decision's next one."""
        if isinstance(intention, Ask | AskLegs):
            answers = await self._fan_out.ask(intention, decision, request)
            return decision.answers(answers, time.monotonic())
        if isinstance(intention, Reserve):
            return await self._reservations.reserve(intention, decision, request, handles)
        if isinstance(intention, Release):
            return await self._reservations.give_back(intention, decision, handles)
        await self._waits.wait(decision, intention.until_s)
        return decision.tick(time.monotonic())

    def _shed(self, intention: Shed, asked: Objective) -> Exception:
        """Count a request that is shed, or that no instance can take; return its error."""
        error = intention.error
        if isinstance(error, OverloadedError):
            self._metrics.shed.labels(error.reason, asked.request_class).inc()
            return error.advised(intention.retry_after_s)
        self._metrics.undecided.inc()
        return UnknownNameError(str(error)) if isinstance(error, UnknownModelError) else error
