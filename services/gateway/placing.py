"""Where a request goes: by a scheduler's decision, else to an earlier decision's next best, else to a fallback."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from protos.block.v1 import common_pb2, scheduler_pb2
from services.gateway.context import GatewayContext
from services.gateway.destinations import (
    LAST_RESORT,
    NEXT_BEST,
    Destination,
    destination_of,
    unreserved_destinations,
)
from services.gateway.incoming import Incoming
from services.gateway.kept_responses import KeptResponse
from services.gateway.request_spans import end_scheduling
from services.gateway.schedulers import NoSchedulerError
from services.http.endpoints import UNPLACED
from services.http.errors import ApiError, ShedError
from services.http.trace_context import TraceParent
from services.logs import log_event

if TYPE_CHECKING:
    from services.tracing.spans import ActiveSpan

log = logging.getLogger(__name__)

BUSY, UNAVAILABLE = 429, 503
ANY_POLICY = "random"  # of requests that are not placed
KEPT = "kept_response"


@dataclass(slots=True, kw_only=True)
class Placing:
    """Finds destinations for one request, never an excluded one."""

    shared: GatewayContext
    incoming: Incoming
    kept: KeptResponse | None = None  # that the request continues: only its instance can
    undivided: bool = field(init=False)  # the request is served by one engine
    took_s: float = 0.0  # in total
    _excluded: list[str] = field(default_factory=list)
    _next_best: Sequence[common_pb2.Instance] = ()

    def __post_init__(self) -> None:
        """Divide the request into two legs only where its body allows that."""
        self.undivided = self.incoming.openai.undivided

    def exclude(self, instance_id: str) -> None:
        """Find other instances from now on."""
        if instance_id not in self._excluded:
            self._excluded.append(instance_id)

    async def place(self) -> Destination:
        """Return the next destination; ApiError where there is none."""
        return await self._place(common_pb2.LEG_SERVE if self.undivided else common_pb2.LEG_UNSPECIFIED)

    async def place_decode_leg(self) -> Destination:
        """Return another destination of a decode leg, whose KV blocks are held; ApiError where there is none."""
        return await self._place(common_pb2.LEG_DECODE)

    async def give_back(self, destination: Destination) -> None:
        """Release the reservations for a destination that is not used, and wait for the delivery."""
        for release in self._releases_of(destination.decision):
            await self.shared.releases.deliver(release)

    def give_back_later(self, destination: Destination) -> None:
        """Release the reservations for a destination that is not used, without waiting."""
        self._give_back(destination.decision)

    async def _place(self, leg: common_pb2.Leg.ValueType) -> Destination:
        self.incoming.request.leg = leg
        start_s = time.monotonic()
        span = self.incoming.spans.scheduling()
        if span is None:
            destination = await self._find(leg, None)
        else:
            destination = await self._recorded(leg, span)
        took_s = time.monotonic() - start_s
        self.took_s += took_s
        self.shared.metrics.decision.observe(took_s)
        return destination

    async def _recorded(self, leg: common_pb2.Leg.ValueType, span: ActiveSpan) -> Destination:
        destination: Destination | None = None
        failure: BaseException | None = None
        try:
            destination = await self._find(leg, span.parent)
        except BaseException as error:
            failure = error
            raise
        finally:
            end_scheduling(span, destination, failure)
        return destination

    async def _find(self, leg: common_pb2.Leg.ValueType, parent: TraceParent | None) -> Destination:
        shared = self.shared
        if self.kept is not None:
            return await self._find_kept(self.kept, parent)
        avoided = shared.failed_lately.avoided()
        if shared.requests.draining:  # one scheduler of several may not know it
            avoided = [*avoided, *shared.requests.draining.difference(avoided)]
        try:
            return await self._decided_avoiding(avoided, parent)
        except ShedError:
            raise
        except NoSchedulerError:
            refused = ApiError(UNAVAILABLE, "no scheduler replies, and no instance is known")
        except ApiError as error:
            if leg == common_pb2.LEG_DECODE or (error.status != UNAVAILABLE and not self._excluded):
                raise
            refused = error
        next_best = (
            one for one in unreserved_destinations(self._next_best, NEXT_BEST) if one.instance_id not in self._excluded
        )
        model = self.incoming.openai.model
        destination = next(next_best, None)
        if destination is None and leg != common_pb2.LEG_DECODE:
            destination = shared.last_resort.next(model, self._excluded, avoided)
        if destination is None:
            raise refused
        shared.metrics.last_resort.labels(destination.policy).inc()
        return destination

    async def _find_kept(self, kept: KeptResponse, parent: TraceParent | None) -> Destination:
        """Return the instance that keeps an earlier response, with a reservation if it can have one."""
        if kept.instance_id in self._excluded:
            raise ApiError(UNAVAILABLE, "the instance that keeps the earlier response cannot be reached")
        try:
            others = [one.instance_id for one in await self.shared.schedulers.instances()]
            found = await self._decided([one for one in others if one != kept.instance_id], parent)
        except ShedError:
            raise
        except (NoSchedulerError, ApiError):
            pass
        else:
            if found.instance_id == kept.instance_id:
                return found
            await self.give_back(found)
        self.shared.metrics.last_resort.labels(KEPT).inc()
        return Destination(instance_id=kept.instance_id, origin=kept.origin, policy=LAST_RESORT, rank=kept.rank)

    async def _decided_avoiding(self, avoided: list[str], parent: TraceParent | None) -> Destination:
        """Get a decision without the instances that failed recently; if none is left, with them."""
        more = [instance_id for instance_id in avoided if instance_id not in self._excluded]
        if more:
            try:
                return await self._decided([*self._excluded, *more], parent)
            except ApiError as error:
                if error.status == BUSY:
                    raise
        return await self._decided(self._excluded, parent)

    async def _decided(self, excluded: list[str], parent: TraceParent | None) -> Destination:
        request = self.incoming.request
        request.waited_s = max(0.0, time.monotonic() - self.incoming.arrived_s)
        is_unplaced = self.incoming.endpoint.kind == UNPLACED
        message = scheduler_pb2.ScheduleRequest(
            request=request,
            prompt=self.incoming.openai.prompt,
            policy=ANY_POLICY if is_unplaced else "",
            exclude_instance_ids=excluded,
            dry_run=is_unplaced,
            explain=self.incoming.explain,
        )
        elsewhere = bool(self.shared.last_resort)  # otherwise the request waits even for schedulers that do not reply
        response = await self.shared.schedulers.schedule(
            message,
            abandoned=lambda response: self._give_back(response.decision),
            insist=not elsewhere,
            parent=parent,
        )
        decision = response.decision
        try:
            destination = destination_of(decision)
        except ValueError as error:
            self._give_back(decision)
            log_event(log, logging.ERROR, "decision names no instance", scheduler=decision.scheduler_id, why=str(error))
            raise NoSchedulerError("the decision names no instance") from None
        self._next_best = decision.next_best
        if decision.HasField("tag"):
            self.incoming.usage.predicted(decision.tag.median_tokens, self.shared.loop.time())
        self.shared.last_resort.note(decision)
        return replace(destination, decision=None) if is_unplaced else destination

    def _give_back(self, decision: common_pb2.Decision | None) -> None:
        for release in self._releases_of(decision):
            self.shared.releases.put(release)

    def _releases_of(self, decision: common_pb2.Decision | None) -> list[common_pb2.ReleaseRequest]:
        """Return what ends the reservations of a decision, one for each leg; none without a decision."""
        if decision is None:
            return []
        instances = [decision.instance]
        if decision.HasField("prefill"):
            instances.append(decision.prefill.instance)
        request_id = self.incoming.request.request_id
        return [common_pb2.ReleaseRequest(request_id=request_id, instance_id=one.instance_id) for one in instances]
