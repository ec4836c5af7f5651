"""Where a request goes: where a scheduler decides, else to an earlier decision's next best, else to a last resort."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.block.v1 import common_pb2, scheduler_pb2
from services.gateway.context import GatewayContext
from services.gateway.destinations import NEXT_BEST, Destination, destination_of, unreserved_destinations
from services.gateway.incoming import Incoming
from services.gateway.schedulers import NobodyError
from services.http.errors import ApiError
from services.logs import log_event

log = logging.getLogger(__name__)

BUSY, UNAVAILABLE = 429, 503


@dataclass(slots=True, kw_only=True)
class Placing:
    """Finds places for one request, none of them twice."""

    shared: GatewayContext
    incoming: Incoming
    took_s: float = 0.0  # all in all
    _tried: list[str] = field(default_factory=list)
    _next_best: Sequence[common_pb2.Instance] = ()

    async def place(self) -> Destination:
        """Find the next one; ApiError where there is none."""
        asked_s = time.monotonic()
        place = await self._found()
        took_s = time.monotonic() - asked_s
        self.took_s += took_s
        self.shared.metrics.decision.observe(took_s)
        self._tried.append(place.instance_id)
        return place

    async def _found(self) -> Destination:
        shared = self.shared
        avoided = shared.failed_lately.avoided()
        try:
            return await self._decided_avoiding(avoided)
        except NobodyError:
            refused = ApiError(UNAVAILABLE, "nobody can say where this request could go: no scheduler answers")
        except ApiError as error:
            if error.status != UNAVAILABLE and not self._tried:
                raise
            refused = error
        next_best = (
            place for place in unreserved_destinations(self._next_best, NEXT_BEST) if not self._was_tried(place)
        )
        place = next(next_best, None) or shared.last_resort.next(self.incoming.openai.model, self._tried, avoided)
        if place is None:
            raise refused
        shared.metrics.last_resort.labels(place.policy).inc()
        return place

    def _was_tried(self, place: Destination) -> bool:
        return place.instance_id in self._tried

    async def _decided_avoiding(self, avoided: list[str]) -> Destination:
        """Ask without those that failed lately; where nothing is left then, with them."""
        more = [instance_id for instance_id in avoided if instance_id not in self._tried]
        if more:
            try:
                return await self._decided([*self._tried, *more])
            except ApiError as error:
                if error.status == BUSY:
                    raise
        return await self._decided(self._tried)

    async def _decided(self, excluded: list[str]) -> Destination:
        request = self.incoming.request
        request.waited_s = max(0.0, time.monotonic() - self.incoming.arrived_s)
        question = scheduler_pb2.ScheduleRequest(
            request=request,
            prompt=self.incoming.openai.prompt,
            exclude_instance_ids=excluded,
            explain=self.incoming.explain,
        )
        elsewhere = bool(self.shared.last_resort)  # then nobody need wait for schedulers that do not answer
        response = await self.shared.schedulers.schedule(question, abandoned=self._give_back, insist=not elsewhere)
        decision = response.decision
        try:
            place = destination_of(decision)
        except ValueError as error:
            self._give_back(response)
            log_event(log, logging.ERROR, "decision names no place", scheduler=decision.scheduler_id, why=str(error))
            raise NobodyError("the decision names no place") from None
        self._next_best = decision.next_best
        self.shared.last_resort.saw(decision)
        return place

    def _give_back(self, response: scheduler_pb2.ScheduleResponse) -> None:
        """Release what was decided in vain."""
        release = common_pb2.ReleaseRequest(
            request_id=self.incoming.request.request_id, instance_id=response.decision.instance.instance_id
        )
        self.shared.releases.put(release)
