"""The scheduler as a server: limits, log lines, shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from services.rpc.server import ServerSettings
from tests.services.scheduler_server.running import LIMIT_S, Client, refused, run, scheduler, until
from tests.services.stub_sidecars import StubSidecar, sidecars


def test_calls_beyond_max_concurrency_are_refused() -> None:
    """They are refused at once; calls in progress are not affected."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, ServerSettings(max_concurrency=1)) as client:
            stubs[0].hung = asyncio.Event()
            first = asyncio.ensure_future(client.decide())
            await until(lambda: bool(stubs[0].questions))
            await refused(client.decide(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            stubs[0].hung.set()
            assert (await first).instance.instance_id == "a"

    run(test)


@asynccontextmanager
async def outlived(stubs: list[StubSidecar], drain_s: float) -> AsyncIterator[tuple[Client, AsyncExitStack]]:
    """Serve a scheduler that is shut down by closing the stack, before its client is closed."""
    async with AsyncExitStack() as stack:
        inner = await stack.enter_async_context(scheduler(stubs, ServerSettings(drain_s=drain_s)))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{inner.port}") as channel:
            yield Client(channel, inner.registry), stack


def test_decisions_in_progress_complete_before_shutdown() -> None:
    """Draining waits for calls in progress, and keeps their reservations; new calls are refused as UNAVAILABLE."""

    async def test() -> None:
        async with sidecars("a") as stubs, outlived(stubs, drain_s=LIMIT_S) as (client, stack):
            stubs[0].hung = asyncio.Event()
            call = asyncio.ensure_future(client.decide())
            await until(lambda: bool(stubs[0].questions))
            closing = asyncio.ensure_future(stack.aclose())
            while not closing.done():
                try:
                    await asyncio.wait_for(client.decide(), 1.0)
                except TimeoutError:  # it was accepted before the shutdown began
                    continue
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE:
                        break
            assert not call.done()
            stubs[0].hung.set()
            assert (await call).instance.instance_id == "a"
            await closing
            assert "r1" in stubs[0].held

    run(test)


def test_each_decision_is_a_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """One line with the decision and its reason; none at info."""
    logger = "services.placement.driver"
    caplog.set_level(logging.DEBUG, logger)

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            await client.decide()
            caplog.set_level(logging.INFO, logger)
            await client.decide()

    run(test)
    (record,) = [record for record in caplog.records if record.name == logger]
    fields: dict[str, Any] = vars(record)["fields"]
    assert record.getMessage() == "decided"
    assert (fields["request_id"], fields["instance"], fields["basis"]) == ("r1", "a", "forecast")


def test_a_shutdown_logs_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Cancelled calls, and a shutdown while sidecars are called, log no errors."""

    async def test() -> None:
        async with sidecars("a", streams=False) as stubs, outlived(stubs, drain_s=0.0) as (client, stack):
            stubs[0].hung = asyncio.Event()
            leaving, staying = (asyncio.ensure_future(client.decide()) for _ in range(2))
            await until(lambda: len(stubs[0].questions) == 2)
            leaving.cancel()
            closing = asyncio.ensure_future(stack.aclose())
            await asyncio.wait([staying])
            assert isinstance(staying.exception(), grpc.aio.AioRpcError)
            stubs[0].hung.set()
            await closing

    run(test)
    ours = [record for record in caplog.records if not record.name.startswith("grpc.")]
    assert not [record for record in ours if record.levelno >= logging.ERROR]
