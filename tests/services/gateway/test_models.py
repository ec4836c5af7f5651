"""The models that the gateway allows and lists: those of the settings with their adapters, or those of instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from services.gateway import models
from tests.services.gateway.stubs import Call, Scene, completes, engines, scene
from tests.services.waiting import run, until


@dataclass
class Serves:
    """An engine that lists models, and answers."""

    cards: Sequence[dict[str, Any]] = (
        {"id": "tiny"},
        {"id": "loaded", "parent": "tiny"},
        {"id": "foreign", "parent": "huge"},
        {"id": "strange", "parent": ["tiny"]},
        {"id": "huge"},
    )
    replies: bool = True  # to a request for the list

    async def __call__(self, call: Call) -> None:
        """Reply to a request for its list, or for a completion."""
        if call.target != "/v1/models":
            await completes(call)
        elif self.replies:
            call.whole({"object": "list", "data": [one | {"object": "model"} for one in self.cards]})
        else:
            call.whole({"error": "busy"}, status=503)


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no list."""
    monkeypatch.setattr(models, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(models, "RETRY_S", 0.0)


async def ids(here: Scene) -> list[str]:
    """Return the ids of the list."""
    return [card["id"] for card in (await here.client.get("/v1/models")).json()["data"]]


async def statuses(here: Scene, *names: str) -> list[int]:
    """Return how requests for some models end."""
    return [(await here.post(model=name)).status_code for name in names]


def test_models_are_listed() -> None:
    """The list comes from the settings, from instances, or from the engines themselves."""

    async def tells(call: Call) -> None:
        call.whole({"object": "list", "data": [{"id": "own", "object": "model", "max_model_len": 77}]})

    async def test() -> None:
        async with scene(completes) as here:
            listed = (await here.client.get("/v1/models")).json()
            assert listed == {
                "object": "list",
                "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "block"}],
            }
            assert not here.scheduler.asked
        async with scene(tells, instance={"models": []}) as here:
            assert (await here.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 77
        async with scene(models=("b", "a")) as here:
            assert await ids(here) == ["b", "a"]
        async with scene(completes) as here:
            await here.post()
            await here.scheduler.stop()
            assert await ids(here) == ["tiny"]

    run(test)


def test_allowed_models_include_their_adapters() -> None:
    """Instances and engines say which they are; those of other models stay refused, and so do other models."""

    async def test() -> None:
        async with scene(Serves(), models=("tiny",), instance={"adapters": ["known"]}) as here:
            listed = (await here.client.get("/v1/models")).json()["data"]
            assert [one["id"] for one in listed] == ["tiny", "known", "loaded"]
            assert [one.get("parent") for one in listed] == [None, "tiny", "tiny"]
            assert await statuses(here, "known", "loaded", "foreign", "huge") == [200, 200, 404, 404]
        async with scene(Serves(), models=("tiny",), instance={"models": ["huge"], "adapters": ["other"]}) as here:
            assert await statuses(here, "other") == [404]
        async with scene(Serves(), models=("tiny",)) as here:
            await here.scheduler.stop()
            assert await ids(here) == ["tiny"]

    run(test)


def test_adapters_of_an_instance_that_names_no_models_may_be_of_any() -> None:
    """Only the engine's own list says which are of an allowed model."""

    async def test() -> None:
        async with scene(
            Serves(), models=("tiny",), instance={"models": [], "adapters": ["foreign", "loaded"]}
        ) as here:
            assert await ids(here) == ["tiny", "loaded"]
            assert await statuses(here, "loaded", "foreign") == [200, 404]

    run(test)


@pytest.mark.usefixtures("always_new")
def test_adapters_stay_known_while_schedulers_do_not_reply() -> None:
    """Requests for them are then refused as those for their base model are: with 503, or served without a decision."""

    async def test() -> None:
        async with scene(Serves(), models=("tiny",), instance={"adapters": ["known"]}) as here:
            assert await ids(here) == ["tiny", "known", "loaded"]
            await here.scheduler.stop()
            assert await ids(here) == ["tiny", "known", "loaded"]
            assert await statuses(here, "tiny", "known", "loaded", "foreign") == [503, 503, 503, 404]
        async with scene(Serves(), models=("tiny",), instance={"adapters": ["known"]}) as here:
            await here.post()
            await here.scheduler.stop()
            assert await statuses(here, "tiny", "known", "foreign") == [200, 200, 404]

    run(test)


@pytest.mark.usefixtures("always_new")
def test_adapters_stay_known_while_their_engine_does_not_reply() -> None:
    """An engine that lists them no more has unloaded them."""

    async def test() -> None:
        engine = Serves()
        async with scene(engine, models=("tiny",)) as here:
            assert await ids(here) == ["tiny", "loaded"]
            engine.replies = False
            assert await ids(here) == ["tiny", "loaded"]
            assert await statuses(here, "loaded", "foreign") == [200, 404]
            engine.replies, engine.cards = True, [{"id": "tiny"}]
            assert await statuses(here, "loaded") == [404]

    run(test)


@pytest.mark.usefixtures("always_new")
def test_a_name_that_may_be_an_adapter_is_unavailable_until_adapters_are_known() -> None:
    """Models of the settings are served meanwhile; a reply of any instance or engine decides."""

    async def test() -> None:
        async with scene(Serves(), models=("tiny",)) as here:
            await here.scheduler.stop()
            refused = await here.post(model="loaded")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("unavailable", "model")
            assert error["message"] == "it is not known yet whether `loaded` is an adapter; retry later"
            await here.scheduler.start()
            await until(lambda: _is_served(here, "loaded"))
            assert await statuses(here, "foreign") == [404]
        engine = Serves(replies=False)
        async with engines(engine) as (running,), scene(models=("tiny",), engine_urls=(running.url,)) as here:
            await here.scheduler.stop()
            assert await statuses(here, "tiny", "loaded", "foreign") == [200, 503, 503]
            engine.replies = True
            assert await statuses(here, "tiny", "loaded", "foreign") == [200, 200, 404]

    run(test)


async def _is_served(here: Scene, model: str) -> bool:
    return await statuses(here, model) == [200]
