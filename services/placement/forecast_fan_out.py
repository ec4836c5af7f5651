"""Asks the sidecars of a decision's candidates for forecasts, all at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from predictor.forecast_result import TO_THE_END
from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate import CandidateStatus
from scheduler.decision import Decision
from scheduler.intentions import Answer, Ask, AskLegs
from services.instances.instance import REMOVED_FROM_LIST
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry
from services.placement.metrics import SchedulerMetrics
from services.placement.request_conversion import set_leg, set_waited
from services.placement.settings import SchedulerSettings
from services.placement.sidecar_connection import ForecastCall, SidecarConnection


class ForecastFanOut:
    """Asks sidecars for forecasts, for at most `max_deciding` decisions at the same time."""

    def __init__(self, registry: InstanceRegistry, settings: SchedulerSettings, metrics: SchedulerMetrics) -> None:
        """Ask the instances of a registry."""
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._fan_outs = asyncio.Semaphore(settings.max_deciding)

    async def ask(self, intention: Ask | AskLegs, decision: Decision, request: common_pb2.Request) -> dict[str, Answer]:
        """Return the forecasts of instances, or why there is none.

        One message goes to each sidecar address for each leg, and one deadline counts for all of them.
        """
        names = intention.instance_ids
        handles = {name: handle for name in names if (handle := self._registry.find(name)) is not None}
        answers = {name: Answer(CandidateStatus.DOWN, note=REMOVED_FROM_LIST) for name in names if name not in handles}
        if not handles:
            return answers
        async with self._fan_outs:
            start_s = time.monotonic()
            set_waited(request, decision.request, start_s, self._settings.deadline_margin_s)
            calls = [call for ask in intention.asks for call in self._calls(ask, request, handles)]
            try:
                await asyncio.wait([call.reply for _, call in calls], timeout=self._settings.sidecar_deadline_s)
            except asyncio.CancelledError:
                for _, call in calls:
                    for name in call.names:
                        handles[name].ignore(call)
                raise
        answered_s = time.monotonic() - start_s
        self._metrics.fan_out_s.observe(answered_s)
        for _, call in calls:
            for name in call.names:
                answers[name] = handles[name].answer(call, request.request_id, answered_s)
        for connection, call in calls:
            connection.note(call)
        return answers

    @staticmethod
    def _calls(
        ask: Ask, request: common_pb2.Request, handles: Mapping[str, InstanceHandle]
    ) -> list[tuple[SidecarConnection, ForecastCall]]:
        by_connection: dict[SidecarConnection, list[str]] = {}
        for name in ask.instance_ids:
            if name in handles:
                by_connection.setdefault(handles[name].connection, []).append(name)
        set_leg(request, ask)
        message = predictor_pb2.PredictRequest(
            requests=[request],
            with_delays=ask.with_delays,
            only_deadlines=ask.with_delays and ask.until != TO_THE_END,
            min_slack_s=ask.min_slack_s,
        ).SerializeToString()
        return [(connection, connection.ask(message, names)) for connection, names in by_connection.items()]
