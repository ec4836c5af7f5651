"""Streams of Generate leave an instance that drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from protos.block.v1 import scheduler_pb2
from services.instances.drains import Drain
from services.instances.instance import DRAINING
from tests.services.scheduler_server.running import (
    CANCELLED,
    FAILED,
    LENGTH,
    ChangingSource,
    Client,
    cluster,
    run,
    scheduler,
    text_of,
    until,
)
from tests.services.stub_engines import StubEngine, engines
from tests.services.stub_sidecars import StubSidecar, sidecars


@asynccontextmanager
async def changing(
    number: int = 2, **settings: Any
) -> AsyncIterator[tuple[Client, ChangingSource, list[StubSidecar], list[StubEngine]]]:
    """A scheduler whose list of instances a test changes; the first engine waits before its third piece."""
    async with engines(number) as behind, sidecars(*"abcd"[:number]) as stubs:
        source = ChangingSource()
        for index, (stub, engine) in enumerate(zip(stubs, behind, strict=True)):
            stub.engine_url, stub.e2e_s = engine.url, 2.0 + 10 * index
            source.instances.append(stub.instance)
        behind[0].hold, behind[0].hold_at = asyncio.Event(), 2
        async with scheduler(source, **settings) as client:
            yield client, source, stubs, behind


def drain(source: ChangingSource, **times: float) -> None:
    """Have the first instance drain."""
    how = Drain(**{"deadline_unix_s": time.time(), **times})
    source.instances = [replace(source.instances[0], state=DRAINING, drain=how), *source.instances[1:]]


async def generating(client: Client, events: list[scheduler_pb2.GenerateResponse]) -> None:
    """Append the events of a stream as they come."""
    message = scheduler_pb2.GenerateRequest(request=client.request(max_tokens=9, output_tokens=None), prompt="Tell me")
    async for event in client.stub.Generate(message):
        events.append(event)  # noqa: PERF401 - they are read as they come


def test_a_stream_moves() -> None:
    """Its client gets the rest from another engine; the first one has not failed."""

    async def test() -> None:
        async with changing() as (client, source, stubs, behind):
            behind[1].pieces = [" a time"]
            events: list[scheduler_pb2.GenerateResponse] = []
            task = asyncio.create_task(generating(client, events))
            await until(lambda: len(events) == 3)
            drain(source)
            await task
            assert text_of(events) == "Once upon a time"
            assert [event.WhichOneof("event") for event in events].count("decision") == 2
            assert behind[1].bodies[0]["prompt"] == "Tell meOnce upon"
            assert (events[-1].outcome.output_tokens, events[-1].outcome.finish_reason) == (3, LENGTH)
            await behind[0].left.wait()
            await until(lambda: bool(stubs[0].outcomes) and bool(stubs[1].outcomes))
            assert (stubs[0].outcomes[0].finish_reason, stubs[0].outcomes[0].migration) == (CANCELLED, "planned")
            assert client.count("block_generate_attempts_total", result="planned") == 1
            assert client.count("block_generate_attempts_total", result="broken") == 0
            assert not any(stub.held for stub in stubs)

    run(test)


@pytest.mark.parametrize(
    ("number", "settings", "reason"),
    [(1, {}, "no_instance"), (2, {"continue_streams": "off"}, "off")],
)
def test_a_stream_that_cannot_move_stays(number: int, settings: dict[str, Any], reason: str) -> None:
    """It ends where it is."""

    async def test() -> None:
        async with changing(number, **settings) as (client, source, _, behind):
            events: list[scheduler_pb2.GenerateResponse] = []
            task = asyncio.create_task(generating(client, events))
            await until(lambda: len(events) == 3)
            drain(source)
            await until(lambda: client.count("block_generate_drain_stays_total", reason=reason) == 1)
            assert behind[0].hold is not None
            behind[0].hold.set()
            await task
            assert text_of(events) == "Once upon a time"
            assert [event.WhichOneof("event") for event in events].count("decision") == 1
            assert events[-1].outcome.output_tokens == 3

    run(test)


def test_a_stream_stays_whose_model_is_listed_no_longer() -> None:
    """That no instance can take it is no reason to end it."""

    async def test() -> None:
        async with changing() as (client, source, _, behind):
            events: list[scheduler_pb2.GenerateResponse] = []
            task = asyncio.create_task(generating(client, events))
            await until(lambda: len(events) == 3)
            source.instances = [replace(one, models=("other",)) for one in source.instances]
            drain(source)
            await until(
                lambda: client.count("block_generate_drain_stays_total", reason="no_instance") == 1 or task.done()
            )
            assert behind[0].hold is not None
            behind[0].hold.set()
            await task
            assert text_of(events) == "Once upon a time"

    run(test)


def test_what_is_left_ends_when_the_instance_has_to_go() -> None:
    """The stream continues on another engine if it can."""

    async def test() -> None:
        async with changing() as (client, source, stubs, behind):
            behind[1].pieces = [" a time"]
            events: list[scheduler_pb2.GenerateResponse] = []
            task = asyncio.create_task(generating(client, events))
            await until(lambda: len(events) == 3)
            drain(source, deadline_unix_s=1.0, force_unix_s=1.0)
            await task
            assert text_of(events) == "Once upon a time"
            await until(lambda: bool(stubs[0].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED

    run(test)


def test_a_request_that_kills_engines_gets_few_of_them() -> None:
    """One more than the migrations that it may make."""

    async def test() -> None:
        async with cluster(4, attempts=4, max_migrations=1) as (client, _, behind):
            for engine in behind:
                engine.breaks_after = 0
            with pytest.raises(Exception, match="closed the connection"):
                await client.generate()
            assert sum(len(engine.bodies) for engine in behind) == 2
            assert client.count("block_generate_poison_suspects_total") == 1

    run(test)
