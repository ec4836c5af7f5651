"""Decisions for the gateway: by schedulers, called in turn behind circuit breakers, or in the gateway's own process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry, Counter

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.circuit import CircuitState
from scheduler.instances import OverloadedError
from services.gateway.scheduler_drains import SchedulerDrains
from services.gateway.scheduler_tails import SchedulerTails
from services.http.errors import ApiError, ShedError
from services.http.trace_context import TRACEPARENT, TraceParent
from services.instances.drains import Drain
from services.live_page.pages import FrameSource
from services.logs import log_event
from services.placement.decision_time import DecisionTime
from services.placement.driver import PlacementDriver
from services.placement.refusals import REFUSALS, UNWILLING, refusal, refusal_of
from services.rpc.errors import INTERNAL, overloaded_from, status_of
from services.rpc.grpc_channel import GrpcChannel
from services.security.own_key import NO_OWN_KEY, OwnKey

log = logging.getLogger(__name__)

SCHEDULER = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
CONNECT_S = 0.5  # to a scheduler; meanwhile no other one is called
MAX_PAUSE_S = 2.0  # so that a scheduler that returns is called again soon
IN_PROCESS = "in-process"  # as the scheduler's address in metrics

AbandonedDecision = Callable[[scheduler_pb2.ScheduleResponse], None]


class NoSchedulerError(ConnectionError):
    """No scheduler replies."""


class SchedulerClient(Protocol):
    """What a gateway needs of schedulers, wherever they run."""

    def __len__(self) -> int:
        """Return the number of schedulers."""

    def reachable(self) -> bool:
        """Return whether any of them can be reached."""

    async def schedule(
        self,
        request: scheduler_pb2.ScheduleRequest,
        *,
        abandoned: AbandonedDecision | None = None,
        insist: bool = True,
        parent: TraceParent | None = None,
    ) -> scheduler_pb2.ScheduleResponse:
        """Get a decision; `parent` is the span of whoever waits for it, where one is recorded."""

    async def release(self, request: common_pb2.ReleaseRequest) -> bool:
        """Report the end of a request; False where no scheduler took it."""

    async def instances(self) -> Sequence[common_pb2.Instance]:
        """Return all instances."""

    async def follow_drains(self, take: Callable[[Mapping[str, Drain]], None]) -> None:
        """Call with the instances that drain, at once and after each change, until cancelled."""

    def frames(self, registry: CollectorRegistry) -> FrameSource:
        """Return what the live page shows, with counters of the gateway's registry."""

    async def close(self) -> None:
        """Close all connections."""


class _Scheduler:
    """One scheduler: its channel and its circuit."""

    def __init__(self, address: str, key: OwnKey) -> None:
        self.address = address
        self.channel = GrpcChannel(address, connect_s=CONNECT_S, key=key)
        self.circuit = CircuitState(longest_pause_s=MAX_PAUSE_S)

    def replied(self, code: grpc.StatusCode) -> bool:
        """Return whether UNAVAILABLE is the scheduler's own reply (it has no instance): the connection is up."""
        return code is grpc.StatusCode.UNAVAILABLE and self.channel.get_state() is grpc.ChannelConnectivity.READY


def _weight(session: str, address: str) -> bytes:
    """Return what orders schedulers for a session, in the same way in every gateway."""
    return hashlib.blake2b(f"{session} {address}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


class Schedulers:
    """Calls one scheduler after the other until one replies; needs a running event loop."""

    def __init__(
        self, addresses: Sequence[str], *, within_s: float, failures: Counter, key: OwnKey = NO_OWN_KEY
    ) -> None:
        """Connect to all of them; `key` is the gateway's own."""
        self._all = [_Scheduler(address, key) for address in addresses]
        self._within_s = within_s
        self._failures = failures
        self._turns = {"schedule": 0, "release": 0, "list": 0}  # each kind of call takes turns by itself
        self._loop = asyncio.get_running_loop()
        for one in self._all:
            one.channel.get_state(try_to_connect=True)

    def __len__(self) -> int:
        """Return the number of schedulers."""
        return len(self._all)

    def reachable(self) -> bool:
        """Return whether any of them is connected; connect otherwise."""
        return any(one.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY for one in self._all)

    async def schedule(
        self,
        request: scheduler_pb2.ScheduleRequest,
        *,
        abandoned: AbandonedDecision | None = None,
        insist: bool = True,
        parent: TraceParent | None = None,
    ) -> scheduler_pb2.ScheduleResponse:
        """Get a decision from any scheduler; while all circuits are open, call one nevertheless only with `insist`.

        The requests of a session go to the same scheduler first, which knows where the last one went.
        A caller that is cancelled meanwhile does not cancel the call: the decision then goes to `abandoned`.
        """
        unwilling: ApiError | None = None
        session = request.request.session_id
        for one in self._in_turn("schedule", CircuitState.allows, insist=insist, session=session):
            try:
                response = await self._call(one, request, abandoned, parent)
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                if code in REFUSALS:
                    one.circuit.succeeded()
                    raise refusal(code, details) from None
                shed = overloaded_from(details, trailing_metadata_of(error))
                if shed is not None:  # by the instances that all schedulers share
                    one.circuit.succeeded()
                    raise ShedError(shed) from None
                self._failures.labels(one.address, code.name).inc()
                if code in UNWILLING or one.replied(code):
                    one.circuit.succeeded()
                    unwilling = ApiError(UNWILLING.get(code, 503), details or "no scheduler can place the request now")
                    continue
                self._failed(one, code, details)
            else:
                one.circuit.succeeded()
                return response
        if unwilling is not None:
            raise unwilling
        raise NoSchedulerError("no scheduler replies")

    async def release(self, request: common_pb2.ReleaseRequest) -> bool:
        """Report the end of a request to any scheduler; False where none took it."""
        # not a trial of its circuit: a scheduler that takes a release may still hang at decisions
        for one in self._in_turn("release", CircuitState.may_try, insist=True):
            try:
                await one.channel.call(
                    f"/{SCHEDULER}/Release", request, common_pb2.ReleaseResponse, timeout_s=self._within_s
                )
            except grpc.aio.AioRpcError as error:
                code = error.code()
                self._failures.labels(one.address, code.name).inc()
                if code in REFUSALS:
                    log_event(
                        log, logging.WARNING, "release refused", request_id=request.request_id, why=error.details()
                    )
                    return False
                if code not in UNWILLING and not one.replied(code):
                    self._failed(one, code, error.details() or "")
            else:
                return True
        return False

    async def instances(self) -> Sequence[common_pb2.Instance]:
        """Get all instances from any scheduler."""
        for one in self._in_turn("list", CircuitState.may_try, insist=True):
            try:
                response = await one.channel.call(
                    f"/{SCHEDULER}/ListInstances",
                    scheduler_pb2.ListInstancesRequest(),
                    scheduler_pb2.ListInstancesResponse,
                    timeout_s=self._within_s,
                )
            except grpc.aio.AioRpcError as error:
                self._failures.labels(one.address, error.code().name).inc()
            else:
                return response.instances
        raise NoSchedulerError("no scheduler replies")

    async def follow_drains(self, take: Callable[[Mapping[str, Drain]], None]) -> None:
        """Follow all schedulers; an instance drains where one of them says so."""
        await SchedulerDrains({one.address: one.channel for one in self._all}, take).run()

    def frames(self, registry: CollectorRegistry) -> FrameSource:
        """Return what the live page shows, with counters of the gateway's registry."""
        return SchedulerTails({one.address: one.channel for one in self._all}, registry)

    async def close(self) -> None:
        """Close all channels."""
        for one in self._all:
            await one.channel.close()

    def _in_turn(
        self, call: str, may: Callable[[CircuitState, float], bool], *, insist: bool, session: str = ""
    ) -> Iterator[_Scheduler]:
        """Yield those whose circuits allow a call, by turns or by session; with `insist` at least one."""
        count = len(self._all)
        if session:
            turn = max(range(count), key=lambda index: _weight(session, self._all[index].address), default=0)
        else:
            turn = self._turns[call] = self._turns[call] + 1
        was_called = False
        for step in range(count):
            one = self._all[(turn + step) % count]
            if may(one.circuit, self._loop.time()):
                was_called = True
                yield one
        if insist and not was_called and count:
            yield min(self._all, key=lambda one: one.circuit.retry_at_s)

    async def _call(
        self,
        one: _Scheduler,
        request: scheduler_pb2.ScheduleRequest,
        abandoned: AbandonedDecision | None,
        parent: TraceParent | None,
    ) -> scheduler_pb2.ScheduleResponse:
        metadata = () if parent is None else ((TRACEPARENT.decode(), parent.header().decode()),)
        call = self._loop.create_task(
            one.channel.call(
                f"/{SCHEDULER}/Schedule",
                request,
                scheduler_pb2.ScheduleResponse,
                timeout_s=self._within_s,
                metadata=metadata,
            )
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if abandoned is None:
                call.cancel()
            else:
                task = self._loop.create_task(_settle(call, abandoned))
                _SETTLING.add(task)
                task.add_done_callback(_SETTLING.discard)
            raise

    def _failed(self, one: _Scheduler, code: grpc.StatusCode, details: str) -> None:
        if one.circuit.failed(self._loop.time()):
            log_event(
                log, logging.WARNING, "scheduler circuit opened", scheduler=one.address, code=code.name, why=details
            )


_SETTLING: set[asyncio.Task[None]] = set()  # referenced, so that they are not collected before they end


async def _settle(call: asyncio.Task[scheduler_pb2.ScheduleResponse], abandoned: AbandonedDecision) -> None:
    try:
        abandoned(await call)
    except grpc.aio.AioRpcError as error:
        log_event(log, logging.DEBUG, "no decision for a client that left", code=error.code().name)


class InProcessScheduler:
    """Has the interface of `Schedulers`; a decision costs a function call instead of a remote one."""

    def __init__(self, driver: PlacementDriver, *, within_s: float | None, failures: Counter) -> None:
        """Decide by a driver, within a time for each request; without one, within that which the policy needs."""
        self._driver = driver
        self._time = DecisionTime(driver.core, within_s, driver.settings.sidecar_deadline_s)
        self._failures = failures

    def __len__(self) -> int:
        """Return the number of schedulers."""
        return 1

    def reachable(self) -> bool:
        """Return whether decisions can be made."""
        return bool(self._driver.registry.directory.by_id)

    async def schedule(
        self,
        request: scheduler_pb2.ScheduleRequest,
        *,
        abandoned: AbandonedDecision | None = None,
        insist: bool = True,
        parent: TraceParent | None = None,
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide; a caller that is cancelled meanwhile leaves no reservation behind."""
        del abandoned, insist, parent  # for decisions that are made elsewhere
        within_s = self._time.within_s()
        try:
            async with asyncio.timeout(within_s):
                decision = await self._driver.schedule(request, self._time.max_wait_s())
        except Exception as error:
            if status_of(error) is INTERNAL:
                log.exception("decision failed", extra={"fields": {"request_id": request.request.request_id}})
            raise self._refused(error, within_s) from None
        return scheduler_pb2.ScheduleResponse(decision=decision)

    def _refused(self, error: Exception, within_s: float) -> ApiError:
        code = status_of(error).grpc_code
        if code not in REFUSALS and not isinstance(error, OverloadedError):
            self._failures.labels(IN_PROCESS, code.name).inc()
        return refusal_of(error, within_s)

    async def release(self, request: common_pb2.ReleaseRequest) -> bool:
        """Release a request at its instance, and report its outcome."""
        try:
            await self._driver.outcomes.release(request)
        except ValueError:
            return False
        return True

    async def instances(self) -> Sequence[common_pb2.Instance]:
        """Return all instances."""
        return [handle.message for handle in self._driver.registry.handles()]

    async def follow_drains(self, take: Callable[[Mapping[str, Drain]], None]) -> None:
        """Follow the driver's list."""
        with self._driver.registry.drains_followed(take):
            await asyncio.Event().wait()

    def frames(self, registry: CollectorRegistry) -> FrameSource:
        """Return what the live page shows."""
        del registry  # the driver's is the gateway's
        return self._driver.tail

    async def close(self) -> None:
        """Do nothing: the driver ends with its own context."""


def trailing_metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Return the texts among the trailing metadata of a call that failed."""
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}
