"""One question to many sidecars at once, one message for each node, and one deadline for all their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from predictor.forecast_result import Forecast
from protos.block.v1 import predictor_pb2
from scheduler.candidate_ranking import Candidate, CandidateStatus
from services.placement.settings import SchedulerSettings
from services.scheduler_server.instance_handle import InstanceHandle
from services.scheduler_server.instance_registry import ModelInstances
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.placement_request import PlacementRequest
from services.scheduler_server.replies import STATES
from services.scheduler_server.sidecar_connection import SidecarConnection


def unwell_in(group: ModelInstances, troubled: set[str], excluded: Collection[str]) -> list[Candidate]:
    """Find those to whom nothing should be sent, as far as is known, and why not; all others are to be compared."""
    if not troubled and not excluded:
        return []
    now_s = time.monotonic()
    candidates = []
    for name in sorted(troubled.union(excluded)):
        sidecar = group.sidecars.get(name)
        if sidecar is None:
            continue
        if sidecar.is_well():
            troubled.discard(name)
        candidate = _as_it_stands(sidecar, excluded, now_s)
        if not candidate.is_compared:
            candidates.append(candidate)
    return candidates


def _as_it_stands(sidecar: InstanceHandle, excluded: Collection[str], now_s: float) -> Candidate:
    if sidecar.name in excluded:
        candidate = sidecar.as_known(CandidateStatus.EXCLUDED, "the caller does not want it")
    elif sidecar.instance.state == "draining":
        candidate = sidecar.as_known(CandidateStatus.DRAINING, "is draining")
    elif sidecar.state in STATES:
        candidate = sidecar.as_known(*STATES[sidecar.state])
    elif not sidecar.may_be_asked():
        candidate = sidecar.as_known(CandidateStatus.DOWN, "its sidecar failed lately and is left alone")
    else:
        candidate = sidecar.as_known()
    if not sidecar.engine.may_try(now_s):
        candidate.engine_failed = True
        candidate.note = candidate.note or "its engine failed lately"
    return candidate


class ForecastFanOut:
    """Asks for forecasts: for one request after the other, for few at once."""

    def __init__(self, settings: SchedulerSettings, measures: SchedulerMetrics) -> None:
        """Ask nobody yet."""
        self._deadline_s = settings.sidecar_deadline_s
        self._measures = measures
        self._turns = asyncio.Semaphore(settings.max_deciding)

    async def ask(
        self,
        wish: PlacementRequest,
        sidecars: Mapping[str, InstanceHandle],
        candidates: Collection[Candidate],
        *,
        delays: bool = False,
    ) -> None:
        """Have all candidates forecast that may be asked; what they say, or fail to say, is noted in them."""
        asked = [
            (sidecars[candidate.instance_id], candidate)
            for candidate in candidates
            if candidate.fate is CandidateStatus.UNASKED
        ]
        if not asked:
            return
        async with self._turns:
            start_s = time.monotonic()
            wish.request.waited_s = wish.waited_s + start_s - wish.taken_s
            question = predictor_pb2.PredictRequest(requests=[wish.request], with_delays=delays).SerializeToString()
            by_node: dict[SidecarConnection, list[str]] = {}
            for sidecar, _ in asked:
                by_node.setdefault(sidecar.node, []).append(sidecar.name)
            answers = {node: node.ask(question, names) for node, names in by_node.items()}
            try:
                await asyncio.wait([one.answer for one in answers.values()], timeout=self._deadline_s)
            except asyncio.CancelledError:
                for sidecar, _ in asked:
                    sidecar.disregard(answers[sidecar.node])
                raise
        took_s = time.monotonic() - start_s
        self._measures.fan_out_s.observe(took_s)
        for sidecar, candidate in asked:
            sidecar.hear(answers[sidecar.node], candidate, wish.request.request_id)
            candidate.answered_s = took_s
        for node, one in answers.items():
            node.note(one)

    async def foretell(self, wish: PlacementRequest, sidecar: InstanceHandle) -> Forecast | None:
        """Have one instance forecast that was chosen without that, for comparison."""
        candidate = sidecar.as_known()
        await self.ask(wish, {sidecar.name: sidecar}, [candidate])
        return candidate.forecast
