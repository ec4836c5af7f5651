"""A gateway that decides in its own process: the same decisions, the same errors, and no reservation left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import httpx
import pytest

from protos.block.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.gateway.server import InProcessDecisions, serving
from services.gateway.settings import GatewaySettings
from services.instances.sources import Listed
from services.placement.driver import PlacementDriver
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from services.security.access_settings import AccessSettings
from tests.services.gateway.stubs import COMPLETION, LOCAL, Answer, completes, engines, hangs
from tests.services.security.key_files import key, tenant, write_keys
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import LIMIT_S, PATIENCE_S, run, until

MODEL = "tiny"


@dataclass(kw_only=True)
class InProcess:
    """A gateway with stub sidecars and stub engines."""

    client: httpx.AsyncClient
    sidecars: list[StubSidecar]
    scheduler_port: int

    async def post(self, **more: Any) -> httpx.Response:
        """Send a completion."""
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", **more})


@asynccontextmanager
async def gateway(
    *answers: Answer, instances: bool = True, schedule_s: float | None = 2 * PATIENCE_S, **scheduler: Any
) -> AsyncIterator[InProcess]:
    """Run a gateway that decides over an instance for each answer of an engine."""
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars(*"abcd"[: len(answers)]))
        behind = await stack.enter_async_context(engines(*answers))
        for stub, engine in zip(stubs, behind, strict=True):
            stub.engine_url, stub.models = engine.url, (MODEL,)
        decisions = InProcessDecisions(
            settings=SchedulerSettings(**{"scheduler_id": "own", "sidecar_deadline_s": PATIENCE_S, **scheduler}),
            source=Listed([stub.instance for stub in stubs] if instances else []),
            rpc=ServerSettings(),
        )
        settings = GatewaySettings(decide="in-process", schedule_s=schedule_s)
        here = await stack.enter_async_context(serving(settings, ServerSettings(), decisions))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        )
        assert here.scheduler_port is not None
        yield InProcess(client=client, sidecars=stubs, scheduler_port=here.scheduler_port)


def test_the_best_instance_answers_and_its_reservation_ends() -> None:
    """The sidecar gets the reservation and, after the answer, its outcome."""

    async def test() -> None:
        async with gateway(completes, completes) as here:
            here.sidecars[1].e2e_s = 1.0
            response = await here.post()
            assert response.json() == COMPLETION
            assert response.headers["x-block-instance"] == "b"
            assert response.headers["x-block-predicted-e2e-ms"] == "1000.0"
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert [len(one.reserved_ids) for one in here.sidecars] == [0, 1]
            assert not here.sidecars[1].held

    run(test)


def test_errors_have_the_statuses_of_remote_decisions() -> None:
    """An unknown model, a request that no instance can serve, and no instance at all."""

    async def test() -> None:
        async with gateway(completes) as here:
            unknown = await here.client.post("/v1/completions", json={"model": "other", "prompt": "Hi"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            here.sidecars[0].refuse_prompts_of = 3
            refused = await here.client.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2, 3]})
            assert refused.status_code == 400
            assert "prompt_tokens" in refused.json()["error"]["message"]
        async with gateway(instances=False) as here:
            assert (await here.post()).status_code == 503
            assert (await here.client.get("/ready")).status_code == 503

    run(test)


def test_a_decision_may_take_as_long_as_its_policy_holds_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is set; one that is set has precedence."""
    schedule = AsyncMock(side_effect=ConnectionError("no instance"))
    monkeypatch.setattr(PlacementDriver, "schedule", schedule)

    async def test() -> None:
        for policy, given_s, max_wait_s in (("block", None, 0.85), ("slo", None, 74.85), ("slo", 12.0, 11.85)):
            async with gateway(completes, policy=policy, schedule_s=given_s, sidecar_deadline_s=0.05) as here:
                assert (await here.post()).status_code == 503
                assert schedule.await_args.args[1] == pytest.approx(max_wait_s)

    run(test)


def test_tenants_have_the_weights_of_the_key_file(tmp_path: Path) -> None:
    """Unless another file is named."""
    alice = key("secret-a", "alice")
    keys = write_keys(tmp_path / "keys.toml", alice, tenant("alice", weight=2))
    others = write_keys(tmp_path / "tenants.toml", tenant("bob", weight=3))

    async def test() -> None:
        for access, named, expected in (
            (AccessSettings(api_key_file=keys), "", {"alice": 2.0}),
            (AccessSettings(api_key_file=keys), others, {"bob": 3.0}),
            (AccessSettings(), "", {}),
        ):
            decisions = InProcessDecisions(settings=SchedulerSettings(tenants=named), source=Listed([]))
            settings = GatewaySettings(decide="in-process")
            async with serving(settings, ServerSettings(access=access), decisions) as here:
                assert here.driver is not None
                assert here.driver.core.rules.tenant_weights == expected

    run(test)


def test_a_defect_in_a_decision_is_logged_and_refuses_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its exception is, the client gets 503, as where a remote scheduler fails."""

    async def test() -> None:
        for error in (KeyError("a defect"), TypeError("a defect")):
            caplog.clear()
            monkeypatch.setattr(PlacementDriver, "place", AsyncMock(side_effect=error))
            async with gateway(completes) as here:
                response = await here.post()
                assert response.status_code == 503
                metrics = (await here.client.get("/metrics")).text
            assert 'block_gateway_scheduler_failures_total{code="INTERNAL",scheduler="in-process"} 1.0' in metrics
            assert "a defect" in caplog.text

    run(test)


def test_an_engine_that_fails_is_avoided_by_the_next_decisions() -> None:
    """The gateway retries on another instance, and the decision core opens the circuit of the engine."""

    async def test() -> None:
        async with gateway(dies, completes) as here:
            here.sidecars[0].e2e_s = 0.5
            for _ in range(4):
                assert (await here.post()).headers["x-block-instance"] == "b"
            await until(lambda: not here.sidecars[0].held)

    run(test)


async def dies(call: Any) -> None:
    """Drop the connection."""
    call.die()


def test_a_client_that_leaves_leaves_no_reservation_behind() -> None:
    """Neither while its request is decided nor while its engine answers."""

    async def test() -> None:
        async with gateway(hangs) as here:
            (stub,) = here.sidecars
            stub.hung_after_reserving = asyncio.Event()
            leaving = asyncio.create_task(here.post())
            await until(lambda: bool(stub.reserved_ids))
            leaving.cancel()
            stub.hung_after_reserving.set()
            await until(lambda: not stub.held)
            leaving = asyncio.create_task(here.post())
            await until(lambda: len(stub.reserved_ids) == 2)
            leaving.cancel()
            await until(lambda: not stub.held)

    run(test)


def test_the_gateway_serves_the_scheduler_service_too() -> None:
    """GRPC clients decide by the same core; an explanation of the gateway's own decision is there."""

    async def test() -> None:
        async with gateway(completes) as here:
            await here.client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers={"x-request-id": "first"}
            )
            async with grpc.aio.insecure_channel(f"{LOCAL}:{here.scheduler_port}") as channel:
                stub = scheduler_pb2_grpc.SchedulerStub(channel)
                listed = await stub.ListInstances(scheduler_pb2.ListInstancesRequest())
                assert (listed.policy, [one.instance_id for one in listed.instances]) == ("block", ["a"])
                explained = await stub.Explain(scheduler_pb2.ExplainRequest(request_id="first"))
                assert explained.decision.scheduler_id == "own"
                assert [one.instance_id for one in explained.decision.candidates] == ["a"]

    run(test)
