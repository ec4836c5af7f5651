"""Schedulers over stub sidecars and stub engines, and a client of theirs for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.instances.instance import Instance, Instances
from services.instances.sources import InstanceSource, Listed
from services.rpc.server import ServerSettings, serving
from services.scheduler_server import SchedulerSettings, scheduling
from tests.services.stub_engines import StubEngine, engines
from tests.services.stub_sidecars import StubSidecar, sidecars

LIMIT_S = 240
PATIENT = {"sidecar_deadline_s": 30.0, "tagger_deadline_s": 30.0}  # long, for busy machines
FOR_EVER = {"first_pause_s": 1000.0, "longest_pause_s": 1000.0}
AT_ONCE = {"first_pause_s": 0.001, "longest_pause_s": 0.002}

FORECAST = common_pb2.DECISION_BASIS_FORECAST
BLIND = common_pb2.DECISION_BASIS_BLIND
LAST_RESORT = common_pb2.DECISION_BASIS_LAST_RESORT
STOP, LENGTH, FAILED, CANCELLED = (
    common_pb2.FINISH_REASON_STOP,
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_FAILED,
    common_pb2.FINISH_REASON_CANCELLED,
)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test on its own event loop; a test that hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; `run` limits the time."""
    while not condition():
        await asyncio.sleep(0.001)


async def refused(call: Awaitable[Any], code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> str:
    """Return the details of the error that a call ends in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return str(caught.value.details())


class Client:
    """A client of one scheduler."""

    def __init__(self, channel: grpc.aio.Channel, registry: CollectorRegistry | None = None, port: int = 0) -> None:
        """Start to number requests from 1."""
        self.stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        self.port = port
        self.registry = registry or CollectorRegistry()
        self._num = 0

    def request(self, **fields: Any) -> common_pb2.Request:
        """Return a new request."""
        self._num += 1
        return common_pb2.Request(
            **{"request_id": f"r{self._num}", "model": "m", "prompt_tokens": 10, "output_tokens": 9, **fields}
        )

    async def decide(self, request: common_pb2.Request | None = None, **options: Any) -> common_pb2.Decision:
        """Call Schedule; return the decision."""
        message = scheduler_pb2.ScheduleRequest(request=request or self.request(), **options)
        decision: common_pb2.Decision = (await self.stub.Schedule(message)).decision
        return decision

    async def choose(self, **options: Any) -> str:
        """Call Schedule; return the id of the chosen instance."""
        return (await self.decide(**options)).instance.instance_id

    async def release(self, decision: common_pb2.Decision, finish_reason: Any = None) -> bool:
        """Call Release; return whether there was a reservation."""
        message = common_pb2.ReleaseRequest(request_id=decision.request_id, instance_id=decision.instance.instance_id)
        if finish_reason is not None:
            message.outcome.CopyFrom(
                common_pb2.Outcome(request_id=decision.request_id, output_tokens=9, finish_reason=finish_reason)
            )
        return bool((await self.stub.Release(message)).released)

    async def generate(self, prompt: str = "Tell me", **options: Any) -> list[scheduler_pb2.GenerateResponse]:
        """Call Generate; return all events of the stream."""
        request = self.request(max_tokens=9, output_tokens=None)
        message = scheduler_pb2.GenerateRequest(**{"request": request, "prompt": prompt, **options})
        return [event async for event in self.stub.Generate(message)]

    def count(self, name: str, **labels: str) -> float:
        """Read a metric."""
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def scheduler(
    found: Sequence[StubSidecar] | InstanceSource,
    server: ServerSettings | None = None,
    tracer: Any = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    """Serve a scheduler over some sidecars; give a client."""
    source = Listed([stub.instance for stub in found]) if isinstance(found, Sequence) else found
    registry = CollectorRegistry()
    complete = SchedulerSettings(**{**PATIENT, **settings})
    async with scheduling(complete, source, registry, poll_s=0.005, tracer=tracer) as service:
        register = partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)
        async with (
            serving(server or ServerSettings(), [register], registry) as here,
            grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel,
        ):
            yield Client(channel, registry, here.port)


@asynccontextmanager
async def cluster(
    number: int = 2, **settings: Any
) -> AsyncIterator[tuple[Client, list[StubSidecar], list[StubEngine]]]:
    """Serve engines, their sidecars and a scheduler; the first instance has by far the best forecast."""
    async with engines(number) as behind, sidecars(*"abcd"[:number]) as stubs:
        for index, (stub, engine) in enumerate(zip(stubs, behind, strict=True)):
            stub.engine_url, stub.e2e_s = engine.url, 2.0 + 10 * index
        async with scheduler(stubs, **settings) as client:
            yield client, stubs, behind


async def until_seen(client: Client, condition: Callable[[dict[str, common_pb2.Indicators]], bool]) -> None:
    """Wait until the indicators that the scheduler has satisfy a condition."""
    while True:
        decision = await client.decide(explain=True, dry_run=True)
        if condition({one.instance_id: one.indicators for one in decision.candidates}):
            return
        await asyncio.sleep(0.005)


async def until_reported(client: Client, stubs: Sequence[StubSidecar]) -> None:
    """Wait until the scheduler has a report of every instance."""
    await until_seen(client, lambda known: all(known[stub.name].HasField("num_running") for stub in stubs))


def statuses(decision: common_pb2.Decision) -> dict[str, str]:
    """Return the status of each candidate."""
    return {
        candidate.instance_id: common_pb2.CandidateFate.Name(candidate.fate).removeprefix("CANDIDATE_FATE_")
        for candidate in decision.candidates
    }


def text_of(events: Sequence[scheduler_pb2.GenerateResponse]) -> str:
    """Return the text of a stream."""
    return "".join(event.chunk.text for event in events)


class ChangingSource(InstanceSource):
    """A list of instances that a test replaces."""

    def __init__(self) -> None:
        """Start with no instance."""
        self.instances: list[Instance] = []

    async def poll(self) -> Instances:
        """Return the current list."""
        return tuple(self.instances)
