"""Requests for LoRA adapters go where an engine lists them, through a gateway with real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.gateway.server import InProcessDecisions, serving
from services.gateway.settings import GatewaySettings
from services.instances.sources import Listed
from services.placement import served_models
from services.placement.served_models import models_in
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from tests.services.gateway.stubs import COMPLETION, LOCAL, Call, engines
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import LIMIT_S, PATIENCE_S, run, until


@dataclass
class Listing:
    """An engine that lists models and adapters, and answers."""

    adapters: Sequence[str] = ()
    num_lists: int = 0

    async def __call__(self, call: Call) -> None:
        """Reply to a request for its list, or for a completion."""
        if call.target != "/v1/models":
            call.whole(COMPLETION)
            return
        self.num_lists += 1
        base: list[dict[str, Any]] = [{"id": "base", "object": "model", "parent": None}]
        call.whole({"object": "list", "data": base + [{"id": one, "parent": "base"} for one in self.adapters]})


@dataclass
class Here:
    """A gateway and the sidecars of its instances."""

    client: httpx.AsyncClient
    sidecars: list[StubSidecar]

    async def post(self, model: str) -> httpx.Response:
        """Send a completion."""
        return await self.client.post("/v1/completions", json={"model": model, "prompt": "Hi"})


@asynccontextmanager
async def gateway(*listings: Listing) -> AsyncIterator[Here]:
    """Run a gateway that decides over instances, each of which has the model `base`."""
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars(*"abcd"[: len(listings)]))
        behind = await stack.enter_async_context(engines(*listings))
        for stub, engine in zip(stubs, behind, strict=True):
            stub.engine_url, stub.models = engine.url, ("base",)
        settings = SchedulerSettings(scheduler_id="own", sidecar_deadline_s=PATIENCE_S)
        source = Listed([stub.instance for stub in stubs])
        decisions = InProcessDecisions(settings=settings, source=source, rpc=ServerSettings())
        own = GatewaySettings(decide="in-process", schedule_s=2 * PATIENCE_S)
        here = await stack.enter_async_context(serving(own, ServerSettings(), decisions))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        )
        yield Here(client=client, sidecars=stubs)


def test_an_adapter_is_placed_where_it_is_loaded() -> None:
    """Although another instance is predicted to be faster; sidecars get the adapter's name."""

    async def test() -> None:
        listings = (Listing(), Listing(["sql"]))
        async with gateway(*listings) as here:
            here.sidecars[0].e2e_s = 0.5
            assert (await here.post("base")).headers["x-block-instance"] == "a"
            assert listings[0].num_lists == 0  # nothing is asked for a model that is known
            for _ in range(3):
                assert (await here.post("sql")).headers["x-block-instance"] == "b"
            asked = here.sidecars[1].questions[-1].requests[0]
            assert (asked.model, asked.adapter) == ("sql", "sql")
            models = (await here.client.get("/v1/models")).json()["data"]
            assert {one["id"]: one.get("parent") for one in models} == {"base": None, "sql": "base"}

    run(test)


def test_an_adapter_that_no_engine_has_loaded_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is served as soon as an engine lists it; engines are not asked for each such request."""
    monkeypatch.setattr(served_models, "LIST_AGAIN_S", 0.0)
    monkeypatch.setattr(served_models, "MAX_LISTS_PER_S", 1e9)

    async def test() -> None:
        listings = (Listing(), Listing())
        async with gateway(*listings) as here:
            refused = await here.post("sql")
            assert refused.status_code == 404
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == "model: The model `sql` does not exist. There are base."
            listings[0].adapters = ["sql"]
            assert (await here.post("sql")).headers["x-block-instance"] == "a"
            monkeypatch.setattr(served_models, "LIST_AGAIN_S", 1e9)
            num = listings[0].num_lists
            for _ in range(5):
                assert (await here.post("other")).status_code == 404
            assert listings[0].num_lists == num

    run(test)


def test_instances_with_adapters_are_asked_again_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose sidecars report a limit of adapters; an adapter that is unloaded is served no more."""
    monkeypatch.setattr(served_models, "LIST_EVERY_S", 0.01)
    monkeypatch.setattr(served_models, "MAX_LISTS_PER_S", 1e9)

    async def test() -> None:
        listings = (Listing(["sql"]), Listing())
        async with gateway(*listings) as here:
            here.sidecars[0].load["max_loras"] = 2.0
            await here.post("base")  # its reply has the indicators
            await until(lambda: listings[0].num_lists > 1)
            assert listings[1].num_lists == 0
            assert (await here.post("sql")).headers["x-block-instance"] == "a"
            listings[0].adapters = ()
            num = listings[0].num_lists
            await until(lambda: listings[0].num_lists > num + 1)
            assert (await here.post("sql")).status_code == 404

    run(test)


def test_lists_of_engines_are_read_with_care() -> None:
    """What is no list is refused, and what is no card is left out."""
    found = models_in({"data": [{"id": "base"}, {"id": "a", "parent": "base"}, {"id": 5}, "x"]})
    assert (found.names, found.adapters) == ({"base", "a"}, {"a"})
    for reply in ({}, [], {"data": 5}, None):
        with pytest.raises(ValueError, match="data: is no list of models"):
            models_in(reply)
