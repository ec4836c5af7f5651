"""A gateway and a picker that have the same settings decide alike, as they have the same decision."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from protos.block.v1 import common_pb2
from services.gateway.server import InProcessDecisions
from services.gateway.server import serving as gateway_serving
from services.gateway.settings import GatewaySettings
from services.instances.sources import Listed
from services.placement.driver import PlacementDriver
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from tests.services.endpoint_picker.running import MODEL, Proxy, head, picking
from tests.services.gateway.stubs import LOCAL, engines, hangs
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import LIMIT_S, PATIENCE_S, run, until

SEED = 7
LINEAR = "linear: lambda = 0.3"
PROMPTS = ["x" * (1 + 400 * number % 7919) for number in range(24)]
HEADERS = {"x-slo-ttft-ms": "400", "x-llm-d-inference-fairness-id": "acme", "x-session-id": "s1"}
READ_REPORTS = ("jsq", LINEAR)
OF_ONE_RUN = ("request_id", "arrival_unix_s", "waited_s")  # fields that no two runs share


def vary(stubs: Sequence[StubSidecar]) -> None:
    """Let instances differ in how reservations delay a request."""
    for number, stub in enumerate(stubs):
        stub.e2e_s = 2.0 + 0.21 * number
        stub.per_reservation_s = 0.5 / (1 + number)


def body(prompt: str, number: int) -> bytes:
    """Write a completion."""
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 10 + number, "stream": True}).encode()


async def until_reported(driver: PlacementDriver | None, policy: str) -> None:
    """Wait until a policy that reads reports has one of every instance; until then it places blindly."""
    assert driver is not None
    if policy in READ_REPORTS:
        instances = driver.core.instances.by_id
        await until(lambda: len(instances) == 3 and all(one.indicators for one in instances.values()))


@asynccontextmanager
async def gateway(policy: str) -> AsyncIterator[tuple[httpx.AsyncClient, list[StubSidecar]]]:
    """Run a gateway that decides by itself."""
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars("a", "b", "c"))
        behind = await stack.enter_async_context(engines(hangs, hangs, hangs))
        for stub, engine in zip(stubs, behind, strict=True):
            stub.engine_url, stub.models = engine.url, (MODEL,)
        decisions = InProcessDecisions(
            settings=SchedulerSettings(policy=policy, seed=SEED, scheduler_id="own", sidecar_deadline_s=PATIENCE_S),
            source=Listed([stub.instance for stub in stubs]),
        )
        settings = GatewaySettings(decide="in-process", schedule_s=2 * PATIENCE_S)
        here = await stack.enter_async_context(gateway_serving(settings, ServerSettings(drain_s=0.0), decisions))
        await until_reported(here.driver, policy)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        )
        yield client, stubs


def reservations(stubs: Sequence[StubSidecar]) -> list[tuple[str, common_pb2.Request]]:
    """Return who reserved which requests, in the order of their maximum lengths, without what is of one run."""
    found = []
    for stub in stubs:
        for one in stub.held.values():
            request = common_pb2.Request()
            request.CopyFrom(one.request)
            for name in OF_ONE_RUN:
                request.ClearField(name)
            found.append((stub.name, request))
    return sorted(found, key=lambda pair: pair[1].max_tokens)


async def by_gateway(policy: str) -> list[tuple[str, common_pb2.Request]]:
    """Send the load through a gateway; no request ends."""
    async with gateway(policy) as (client, stubs):
        vary(stubs)
        asking = []
        for number, prompt in enumerate(PROMPTS):
            content = body(prompt, number)
            asking.append(asyncio.create_task(client.post("/v1/completions", content=content, headers=HEADERS)))
            await until(lambda number=number: sum(len(stub.held) for stub in stubs) == number + 1)
        found = reservations(stubs)
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        return found


async def by_picker(policy: str) -> list[tuple[str, common_pb2.Request]]:
    """Show the load to a picker; no request ends."""
    async with picking(hangs, hangs, hangs, policy=policy, seed=SEED) as here:
        await until_reported(here.running.driver, policy)
        vary(here.sidecars)
        open_ones: list[Any] = []
        for number, prompt in enumerate(PROMPTS):
            one = Proxy(call=here.stub.Process())
            await one.send_headers({**head(), **HEADERS})
            await one.send_body(body(prompt, number))
            await one.read()
            open_ones.append(one)
        return reservations(here.sidecars)


@pytest.mark.parametrize("policy", ["block", "random", "jsq", LINEAR])
def test_both_reserve_the_same_requests_at_the_same_instances(policy: str) -> None:
    """Each request with the same facts; instances forecast by what is reserved there."""

    async def test() -> None:
        placed = await by_gateway(policy)
        assert len({name for name, _ in placed}) > 1
        assert await by_picker(policy) == placed

    run(test)
