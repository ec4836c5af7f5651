"""Several schedulers behind one face: asked in turn, the dead left alone until they come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import grpc
from prometheus_client import Counter

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scheduler.circuit import CircuitState
from services.http.errors import ApiError
from services.logs import log_event

log = logging.getLogger(__name__)

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # we know better whom to ask instead
    ("grpc.max_send_message_length", -1),
)

# What a scheduler says of the request itself: another would say the same.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 404,
}
# What it says of the state of things: it lives, but another may see more.
UNWILLING = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.FAILED_PRECONDITION: 503,
}
LONGEST_PAUSE_S = 2.0  # a scheduler that is back is soon asked again

Settled = Callable[[scheduler_pb2.ScheduleResponse], None]


class NobodyError(ConnectionError):
    """No scheduler answers."""


class _Scheduler:
    """One of them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self.channel)
        self.circuit = CircuitState(longest_pause_s=LONGEST_PAUSE_S)

    def says_itself(self, code: grpc.StatusCode) -> bool:
        """Tell a scheduler that has no instance from one that is not there: the connection stands."""
        return code is grpc.StatusCode.UNAVAILABLE and self.channel.get_state() is grpc.ChannelConnectivity.READY


class Schedulers:
    """Asks one after the other until one answers. Needs a running event loop."""

    def __init__(self, addresses: Sequence[str], *, within_s: float, failures: Counter) -> None:
        """Begin to connect to all of them."""
        self._all = [_Scheduler(address) for address in addresses]
        self._within_s = within_s
        self._failures = failures
        self._turns = {"schedule": 0, "release": 0, "list": 0}  # each kind of call goes round by itself
        self._loop = asyncio.get_running_loop()
        for one in self._all:
            one.channel.get_state(try_to_connect=True)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def reachable(self) -> bool:
        """Tell whether there is a connection to any of them; look for one otherwise."""
        return any(one.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY for one in self._all)

    async def schedule(
        self, request: scheduler_pb2.ScheduleRequest, *, abandoned: Settled | None = None, insist: bool = True
    ) -> scheduler_pb2.ScheduleResponse:
        """Get a decision from any; while none has answered lately, ask nevertheless only if we `insist`.

        A caller who is cancelled meanwhile does not cancel the call: what was decided in vain goes to `abandoned`.
        """
        unwilling: ApiError | None = None
        for one in self._in_turn("schedule", CircuitState.allows, insist=insist):
            try:
                response = await self._call(one, request, abandoned)
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                if code in REFUSALS:
                    one.circuit.succeeded()
                    raise _refused(code, details) from None
                self._failures.labels(one.address, code.name).inc()
                if code in UNWILLING or one.says_itself(code):
                    one.circuit.succeeded()
                    unwilling = ApiError(UNWILLING.get(code, 503), details or "no scheduler takes this now")
                    continue
                self._failed(one, code, details)
            else:
                one.circuit.succeeded()
                return response
        if unwilling is not None:
            raise unwilling
        raise NobodyError("no scheduler answers")

    async def release(self, request: common_pb2.ReleaseRequest) -> bool:
        """Tell an end to any; False where none took it."""
        for one in self._in_turn(
            "release", CircuitState.may_try, insist=True
        ):  # no trial: who hears it may yet hang at decisions
            try:
                await one.stub.Release(request, timeout=self._within_s)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                self._failures.labels(one.address, code.name).inc()
                if code in REFUSALS:
                    log_event(
                        log, logging.WARNING, "release refused", request_id=request.request_id, why=error.details()
                    )
                    return False
                if code not in UNWILLING and not one.says_itself(code):
                    self._failed(one, code, error.details() or "")
            else:
                return True
        return False

    async def instances(self) -> Sequence[common_pb2.Instance]:
        """Hear from any which instances there are."""
        for one in self._in_turn("list", CircuitState.may_try, insist=True):
            try:
                response = await one.stub.ListInstances(scheduler_pb2.ListInstancesRequest(), timeout=self._within_s)
            except grpc.aio.AioRpcError as error:
                self._failures.labels(one.address, error.code().name).inc()
            else:
                return response.instances
        raise NobodyError("no scheduler answers")

    async def close(self) -> None:
        """Hang up."""
        for one in self._all:
            await one.channel.close()

    def _in_turn(self, call: str, may: Callable[[CircuitState, float], bool], *, insist: bool) -> Iterator[_Scheduler]:
        """Give those that may be asked, beginning with another each time; else, if need be, the first that will."""
        turn = self._turns[call] = self._turns[call] + 1
        count = len(self._all)
        tried = False
        for step in range(count):
            one = self._all[(turn + step) % count]
            if may(one.circuit, self._loop.time()):
                tried = True
                yield one
        if insist and not tried and count:
            yield min(self._all, key=lambda one: one.circuit.retry_at_s)

    async def _call(
        self, one: _Scheduler, request: scheduler_pb2.ScheduleRequest, abandoned: Settled | None
    ) -> scheduler_pb2.ScheduleResponse:
        call = one.stub.Schedule(request, timeout=self._within_s)
        done: asyncio.Future[None] = self._loop.create_future()
        call.add_done_callback(lambda _: _set(done))
        try:
            await done
        except asyncio.CancelledError:
            if abandoned is not None:
                task = self._loop.create_task(_settle(call, abandoned))
                _SETTLING.add(task)
                task.add_done_callback(_SETTLING.discard)
            raise
        return await call

    def _failed(self, one: _Scheduler, code: grpc.StatusCode, details: str) -> None:
        if one.circuit.failed(self._loop.time()):
            log_event(
                log, logging.WARNING, "scheduler does not answer", scheduler=one.address, code=code.name, why=details
            )


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


_SETTLING: set[asyncio.Task[None]] = set()  # or they would be collected before they end


async def _settle(
    call: grpc.aio.UnaryUnaryCall[scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleResponse], abandoned: Settled
) -> None:
    try:
        abandoned(await call)
    except grpc.aio.AioRpcError as error:
        log_event(log, logging.DEBUG, "nothing was decided for a client that left", code=error.code().name)


def _refused(code: grpc.StatusCode, details: str) -> ApiError:
    message = (details or "the request was refused").removeprefix("request.")
    if code is grpc.StatusCode.NOT_FOUND:
        return ApiError(404, message, code="model_not_found", param="model")
    return ApiError(REFUSALS[code], message)
