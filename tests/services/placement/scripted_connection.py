"""A placement driver over scripted sidecars, on an event loop whose clock is virtual: nothing in it takes time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, predictor_pb2
from scheduler.candidate import CandidateStatus
from scheduler.intentions import Answer
from scheduler.objectives import NO_OBJECTIVE
from services.instances.instance import Instance
from services.placement.circuit_breaker import CircuitBreaker
from services.placement.driver import PlacementDriver
from services.placement.instance_registry import InstanceRegistry
from services.placement.length_resolution import LengthResolver
from services.placement.metrics import SchedulerMetrics
from services.placement.settings import SchedulerSettings
from services.placement.sidecar_connection import ForecastCall
from services.rpc.messages import LEG_NAMES, forecast_message, indicators_message
from services.rpc.objectives import set_objective
from tests.scheduler.scripted import EPOCH, FIRST_S, NOTES, PROMPT_TOKENS, Reply, Script, Sidecar, fail_engines

FAILED = {
    CandidateStatus.DOWN: ConnectionError(NOTES[CandidateStatus.DOWN]),
    CandidateStatus.INVALID: ValueError(NOTES[CandidateStatus.INVALID]),
}
RESULTS = {
    "reserved": predictor_pb2.RESERVE_RESULT_RESERVED,
    "conflict": predictor_pb2.RESERVE_RESULT_CONFLICT,
    "refused": predictor_pb2.RESERVE_RESULT_REFUSED,
}

CLOCK_RESOLUTION_S = 1e-12  # the loop runs timers that are closer than this at the same time

Entry = Callable[[PlacementDriver, common_pb2.Request, frozenset[str], bool], Awaitable[Any]]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that, instead of waiting for its next timer, moves its clock there."""

    def __init__(self) -> None:
        """Start the clock."""
        self.now_s = 0.0
        super().__init__(_NoWait(self))
        self._clock_resolution = CLOCK_RESOLUTION_S

    def time(self) -> float:
        """Return the virtual time."""
        return self.now_s


class _NoWait(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """Advance the clock by what would be waited for."""
        if timeout is None:
            raise AssertionError("all tasks wait for each other")
        if timeout > 0:
            self._loop.now_s = max(self._loop.now_s, self._loop._scheduled[0]._when)
        return super().select(0)


@contextmanager
def virtual_clock() -> Iterator[VirtualLoop]:
    """An event loop whose time is that of all servers."""
    loop = VirtualLoop()
    with mock.patch("time.monotonic", loop.time):
        try:
            yield loop
        finally:
            loop.run_until_complete(_cancel_others())
            loop.close()


async def _cancel_others() -> None:
    """Cancel what still runs; a task that is collected while it waits would be logged in some later test."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ScriptedConnection:
    """Replies as sidecars of a script do, in their wire form; each address is one instance."""

    def __init__(self, sidecar: Sidecar, settings: SchedulerSettings, metrics: SchedulerMetrics) -> None:
        """Reach one sidecar."""
        self.sidecar = sidecar
        self.names: Sequence[str] = ()
        self.breaker = CircuitBreaker(sidecar.name, settings.circuit(), metrics)
        self._deadline_s = settings.sidecar_deadline_s
        self._changed = asyncio.Event()

    def ask(self, message: bytes, names: Sequence[str]) -> ForecastCall:
        """Reply after as long as the script says."""
        loop = asyncio.get_running_loop()
        request = predictor_pb2.PredictRequest.FromString(message)
        asked = request.requests[0]
        request_id = asked.request_id
        reply: asyncio.Future[bytes] = loop.create_future()
        scripted = self.sidecar.next_reply("forecasts", number_of(request_id))

        def replies() -> None:
            if scripted.status in FAILED:
                reply.set_exception(FAILED[scripted.status])
                reply.exception()
            else:
                leg = LEG_NAMES[asked.leg]
                answer = self.sidecar.answer(
                    scripted, delays=request.with_delays, leg=leg, in_s=asked.in_s, left_s=left_s(asked)
                )
                reply.set_result(predict_response(self.sidecar.name, request_id, answer).SerializeToString())

        if scripted.status is not CandidateStatus.LATE:
            loop.call_at(loop.time() + scripted.after_s, replies)
        return ForecastCall(names, reply, self._deadline_s)

    def note(self, call: ForecastCall) -> None:
        """Count nothing: circuits are no part of the script."""

    def note_failure(self, status: CandidateStatus) -> None:
        """Count nothing."""

    async def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Reserve, or fail, after as long as the script says."""
        number = number_of(request.request.request_id)
        scripted = self.sidecar.next_reply("reservations", number)
        late = scripted.status is CandidateStatus.LATE
        await until(asyncio.get_running_loop().time() + (self._deadline_s if late else scripted.after_s))
        if_version = request.if_version if request.HasField("if_version") else None
        result = self.sidecar.reserve(scripted, if_version, number, LEG_NAMES[request.request.leg])
        if late:
            raise TimeoutError(NOTES[CandidateStatus.LATE])
        if scripted.status in FAILED:
            raise FAILED[scripted.status]
        return reserve_response(self.sidecar, scripted, result, request)

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Take a release, or fail."""
        if self.sidecar.instance.keeps_released:
            raise ConnectionError("cannot be reached")
        return common_pb2.ReleaseResponse(released=self.sidecar.release(number_of(request.request_id)))

    async def watch(
        self, request: predictor_pb2.WatchRequest, on_report: Callable[[predictor_pb2.WatchResponse], None]
    ) -> None:
        """Report now, and whenever a request finished."""
        while True:
            self._changed.clear()
            on_report(
                predictor_pb2.WatchResponse(
                    instance_id=self.sidecar.name,
                    full=True,
                    indicators=indicators_message(self.sidecar.indicators(), age_s=0.0),
                    version=self.sidecar.version,
                    epoch=EPOCH,
                    state=common_pb2.INSTANCE_STATE_READY,
                )
            )
            await self._changed.wait()

    def finish(self) -> None:
        """Finish a request, and report it."""
        self.sidecar.finish()
        self._changed.set()

    def stop_reserving(self) -> None:
        """Go on as before."""

    async def close(self) -> None:
        """There is no channel to close."""


async def until(time_s: float) -> None:
    """Wait until a time of the loop, exactly."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_at(time_s, done.set_result, None)
    await done


def number_of(request_id: str) -> int:
    """The number of a scripted request."""
    return int(request_id.removeprefix("r"))


def left_s(request: common_pb2.Request) -> float:
    """Return when the first token of a request is due, from now on."""
    return request.slo.ttft_s - request.waited_s if request.slo.HasField("ttft_s") else math.inf


def predict_response(name: str, request_id: str, answer: Answer) -> predictor_pb2.PredictResponse:
    """The wire form of an answer."""
    response = predictor_pb2.PredictResponse(instance_id=name, version=answer.version, epoch=answer.epoch)
    if answer.status is CandidateStatus.STOPPED:
        response.state = common_pb2.INSTANCE_STATE_DOWN
        return response
    response.state = common_pb2.INSTANCE_STATE_READY
    prediction = response.predictions.add(request_id=request_id)
    if answer.forecast is not None:
        prediction.forecast.CopyFrom(forecast_message(answer.forecast))
    else:
        prediction.refusal.field, prediction.refusal.reason = answer.note.split(": ")
    return response


def reserve_response(
    sidecar: Sidecar, scripted: Reply, result: str, request: predictor_pb2.ReserveRequest
) -> predictor_pb2.ReserveResponse:
    """The wire form of a reservation's result."""
    request_id = request.request.request_id
    response = predictor_pb2.ReserveResponse(
        instance_id=sidecar.name, version=sidecar.version, epoch=EPOCH, expires_in_s=10.0, result=RESULTS[result]
    )
    response.state = common_pb2.INSTANCE_STATE_READY
    response.prediction.request_id = request_id
    if result == "conflict":
        asked = request.request
        forecast = sidecar.forecast(leg=LEG_NAMES[asked.leg], in_s=asked.in_s, left_s=left_s(asked))
        response.prediction.forecast.CopyFrom(forecast_message(forecast))
    elif result == "refused":
        field, _, reason = NOTES[scripted.status].rpartition(": ")
        response.prediction.refusal.field, response.prediction.refusal.reason = field or "engine", reason
        if scripted.status is CandidateStatus.STOPPED:
            response.state = common_pb2.INSTANCE_STATE_DOWN
    return response


def drive(script: Script, entry: Entry) -> None:
    """Run a script through a placement driver; each request enters by `entry`."""
    with virtual_clock() as loop:
        loop.now_s = FIRST_S
        loop.run_until_complete(_driven(script, entry))


async def _driven(script: Script, entry: Entry) -> None:
    loop = asyncio.get_running_loop()
    sidecars = {one.name: Sidecar(one, script) for one in script.instances}
    connections: dict[str, ScriptedConnection] = {}
    settings = SchedulerSettings(
        policy=script.policy,
        seed=script.seed,
        sidecar_deadline_s=script.deadline_s,
        max_conflicts=script.max_conflicts,
        max_held=script.max_held,
        forecast_always=script.forecast_always,
        without_pool=script.without_pool,
        deadline_margin_s=0.0,
        failures_to_open=1 << 30,
        **script.limits,
    )
    metrics = SchedulerMetrics(CollectorRegistry())

    def connection(address: str, *_: Any) -> ScriptedConnection:
        name = names[address]
        connections[name] = ScriptedConnection(sidecars[name], settings, metrics)
        return connections[name]

    names: Mapping[str, str] = {f"127.0.0.1:{port}": name for port, name in enumerate(sidecars, start=1)}
    registry = InstanceRegistry(settings, metrics)
    with mock.patch("services.placement.instance_registry.SidecarConnection", connection):
        registry.update(
            tuple(
                Instance(
                    instance_id=name,
                    engine_url="http://127.0.0.1:1",
                    sidecar_address=address,
                    role=sidecars[name].instance.role,
                    state="draining" if sidecars[name].instance.draining else "ready",
                )
                for address, name in names.items()
            )
        )
    fail_engines(script, registry.directory)
    driver = PlacementDriver(settings, registry, LengthResolver(settings, metrics), metrics)
    driver.core.random = np.random.default_rng(script.seed).random
    for name, sidecar in sidecars.items():
        for after_s in sidecar.instance.finishes_s:
            loop.call_at(FIRST_S + after_s, connections[name].finish)

    async def arrive(number: int) -> None:
        arrival = script.arrivals[number]
        await until(FIRST_S + arrival.after_s)
        request = common_pb2.Request(
            request_id=f"r{number}",
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=9,
            client_id=arrival.client_id,
            session_id=arrival.session_id,
        )
        if arrival.objective != NO_OBJECTIVE:
            set_objective(request, arrival.objective)
        with suppress(ValueError, ConnectionError):  # where it is shed, the record shows why
            await entry(driver, request, arrival.excluded, arrival.dry_run)

    async with asyncio.TaskGroup() as group:
        for number in range(len(script.arrivals)):
            group.create_task(arrive(number))
    await registry.close()
