"""Instances over HTTP: registered, drained, removed, kept over a restart, and shared by a file."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.instances.drains import Drain
from services.instances.registered_instances import MAX_REGISTERED
from services.instances.sources import InstanceSource, Listed
from services.placement.driver import PlacementDriver
from services.placement.instance_pages import instance_routes
from services.placement.lifecycle import placement_driver
from services.placement.settings import SchedulerSettings
from services.rpc.server import ServerSettings, metrics_served
from tests.services.scheduler_server.running import ChangingSource
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import run, until


@dataclass(kw_only=True)
class Scene:
    """A placement driver, and a client of its port for operators."""

    driver: PlacementDriver
    client: httpx.AsyncClient

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Send a request; return the status and the body of the reply."""
        reply = await self.client.request(method, path, json=body, **options)
        return reply.status_code, reply.json() if reply.content else None

    async def names(self) -> list[str]:
        """The ids of all instances, by HTTP; none while requests can be placed at others."""
        _, body = await self.call("GET", "/instances")
        names = [one["instance_id"] for one in body["instances"]]
        placeable = [handle.name for handle in self.driver.registry.handles()]
        return names if names == placeable else []

    async def one(self, name: str) -> dict[str, Any]:
        """What is said of an instance."""
        status, body = await self.call("GET", f"/instances/{name}")
        assert status == 200
        return dict(body)


@asynccontextmanager
async def serving(source: InstanceSource, path: Path | str = "") -> AsyncIterator[Scene]:
    """Serve the instances of a source, and those that are registered."""
    registry = CollectorRegistry()
    async with placement_driver(SchedulerSettings(registered_file=str(path)), source, registry, 0.01) as driver:
        server = ServerSettings(metrics_port=0)
        async with (
            metrics_served(server, registry, partial(instance_routes, driver)) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ):
            yield Scene(driver=driver, client=client)


def table(stub: StubSidecar, **more: Any) -> dict[str, Any]:
    """What is sent to register an instance."""
    one = stub.instance
    return {
        "instance_id": one.instance_id,
        "engine_url": one.engine_url,
        "sidecar_address": one.sidecar_address,
        **more,
    }


def facts(name: str = "a", **more: Any) -> dict[str, Any]:
    """The facts of an instance that does not exist."""
    return {"instance_id": name, "engine_url": "http://10.9.8.7:8000", "sidecar_address": "10.9.8.7:50052", **more}


def listed(stubs: Sequence[StubSidecar]) -> Listed:
    """A list by flags."""
    return Listed([stub.instance for stub in stubs])


def test_a_registered_instance_is_used_and_removed() -> None:
    """At once; each call may be repeated."""

    async def test() -> None:
        async with sidecars("a", "b") as (a, b), serving(listed([a])) as here:
            status, body = await here.call("POST", "/instances", table(b, models=["m"]))
            assert (status, body["instance_id"], body["source"], body["models"]) == (201, "b", "http", ["m"])
            assert (await here.call("POST", "/instances", table(b, models=["m"])))[0] == 200
            assert await here.names() == ["a", "b"]
            assert here.driver.registry.find("b") is not None
            assert [(await here.one(name))["source"] for name in "ab"] == ["flags", "http"]
            for _ in range(2):
                assert await here.call("DELETE", "/instances/b") == (204, None)
            assert await here.names() == ["a"]
            assert (await here.call("GET", "/instances/b"))[0] == 404

    run(test)


def test_other_facts_replace_only_if_asked_to() -> None:
    """409 tells how; a connection to an instance that did not change is kept."""

    async def test() -> None:
        async with serving(Listed(())) as here:
            assert (await here.call("POST", "/instances", facts()))[0] == 201
            before = here.driver.registry.find("a")
            status, body = await here.call("POST", "/instances", facts(role="decode"))
            assert status == 409
            assert body["error"]["message"] == (
                "instance_id: 'a' is registered with other facts; replace them with PUT or ?replace=true"
            )
            assert here.driver.registry.find("a") is before
            assert (await here.call("POST", "/instances?replace=true", facts(role="decode")))[0] == 200
            assert (await here.one("a"))["role"] == "decode"
            fast = {"tier": "fast", "tier_tpot_s": 0.05}
            assert (await here.call("PUT", "/instances/a", {**facts(), **fast}))[0] == 200
            assert (await here.one("a"))["tier"] == "fast"
            status, body = await here.call("POST", "/instances", {**facts("f"), **fast, "tier_tpot_s": 0.1})
            assert (status, body["error"]["message"][:12]) == (400, "tier_tpot_s:")
            assert (await here.call("PUT", "/instances/b", facts("a")))[0] == 400
            del (without := facts("c"))["instance_id"]
            assert (await here.call("PUT", "/instances/c%2F1", without))[1]["instance_id"] == "c/1"
            assert (await here.one("c%2F1"))["state"] == "ready"

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/instances", {}, 400, "instance_id: is missing"),
        ("GET", "/instances%2Fa", None, 404, "there is nothing at /instances/a"),
        ("POST", "/instances", [], 400, "body: must be an object"),
        ("POST", "/instances", facts(engine_url="10.0.0.1"), 400, "engine_url: "),
        ("POST", "/instances", facts(sidecar_address="10.0.0.1"), 400, "sidecar_address: "),
        ("POST", "/instances", facts(models="m"), 400, "models: must be a list"),
        ("POST", "/instances", facts(role="cook"), 400, "role: "),
        ("POST", "/instances", facts(colour="red"), 400, "colour"),
        ("POST", "/instances", facts(ttl_s=0), 400, "ttl_s: must be a time above 0"),
        ("POST", "/instances", facts(ttl_s="1"), 400, "ttl_s: "),
        ("POST", "/instances", facts(drain=1), 400, "drain: "),
        ("POST", "/instances", facts("listed"), 409, "is listed by the list"),
        ("POST", "/instances?replace=perhaps", facts(), 400, "replace: "),
        ("DELETE", "/instances/listed", None, 409, "is listed by the list"),
        ("POST", "/instances/nobody/drain", {}, 404, "there is no instance 'nobody'"),
        ("DELETE", "/instances/nobody/drain", None, 404, "there is no instance 'nobody'"),
        ("POST", "/instances/listed/drain", {"deadline_s": -1}, 400, "deadline_s: "),
        ("POST", "/instances/listed/drain", {"deadline_s": None}, 400, "deadline_s: "),
        ("POST", "/instances/listed/drain", {"deadline_s": 1e99}, 400, "deadline_s: "),
        ("POST", "/instances/listed/drain", {"migrate": 1}, 400, "migrate: "),
        ("POST", "/instances/listed/drain", {"deadline_s": 9, "force_after_s": 8}, 400, "force_after_s: "),
        ("POST", "/instances/listed/drain", {"dedline_s": 1}, 400, "dedline_s"),
        ("POST", "/instances/listed", {}, 405, "takes GET, PUT, DELETE"),
        ("GET", "/instances/listed/drain", None, 405, "takes POST, DELETE"),
        ("GET", "/instances/listed/other", None, 404, "there is nothing at"),
        ("GET", "/instances/", None, 404, "there is nothing at"),
    ],
)
def test_bad_requests_are_refused_in_one_line(method: str, path: str, body: Any, status: int, message: str) -> None:
    """It names the field, and nothing changes."""

    async def test() -> None:
        source = ChangingSource()
        async with sidecars("listed") as (stub,):
            source.instances = [stub.instance]
            async with serving(source) as here:
                replied, reply = await here.call(method, path, body)
                assert replied == status, reply
                assert message in reply["error"]["message"]
                assert "\n" not in reply["error"]["message"]
                assert await here.names() == ["listed"]
                assert (await here.one("listed"))["state"] == "ready"

    run(test)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 10_000, b'{"ttl_s": NaN}', b"x" * 70_000])
def test_bodies_that_are_no_json(body: bytes) -> None:
    """They are refused, and the port goes on."""

    async def test() -> None:
        async with serving(Listed(())) as here:
            reply = await here.client.post("/instances", content=body)
            assert reply.status_code in (400, 413)
            assert reply.json()["error"]["message"].startswith(("body: ", "the body", "ttl_s: "))
            assert (await here.call("POST", "/instances", facts()))[0] == 201

    run(test)


def test_callers_elsewhere_are_refused() -> None:
    """A page of another site, which a browser on this machine shows, is one of them."""

    async def test() -> None:
        async with serving(Listed(())) as here:
            reply = await here.client.post("/instances", json=facts(), headers={"origin": "https://example.com"})
            assert reply.status_code == 403
            assert await here.names() == []

    run(test)


def test_an_instance_of_any_list_drains() -> None:
    """No request is placed there; the same order again changes nothing, another one replaces it."""

    async def test() -> None:
        async with sidecars("a", "b") as (a, b), serving(listed([a])) as here:
            await here.call("POST", "/instances", table(b))
            handles = {name: here.driver.registry.find(name) for name in "ab"}
            for name in "ab":
                status, body = await here.call("POST", f"/instances/{name}/drain", {"deadline_s": 60})
                assert (status, body["state"]) == (202, "draining")
                assert 59 < body["drain"]["deadline_in_s"] <= 60
            assert not any(one.status.is_healthy for one in here.driver.registry.handles())
            first = here.driver.registry.drains()["a"]
            assert (await here.call("POST", "/instances/a/drain", {"deadline_s": 60}))[0] == 202
            assert here.driver.registry.drains()["a"] == first
            await here.call("POST", "/instances/a/drain", {"deadline_s": 1, "migrate": False, "force_after_s": 9})
            now = here.driver.registry.drains()["a"]
            assert (now.migrate, now.force_unix_s - now.deadline_unix_s) == (False, 8.0)
            await until(lambda: _knows_requests(here))  # the sidecar is asked for them while it drains
            for _ in range(2):
                assert (await here.call("DELETE", "/instances/a/drain"))[0] == 204
            assert (await here.one("a"))["state"] == "ready"
            assert here.driver.registry.drains().keys() == {"b"}
            assert {name: here.driver.registry.find(name) for name in "ab"} == handles  # as before, with their history

    async def _knows_requests(here: Scene) -> bool:
        return (await here.one("a"))["requests"] == 1  # as the stub says

    run(test)


def test_a_drain_by_the_list_cannot_be_undone_here() -> None:
    """The reply names the list."""

    async def test() -> None:
        source = ChangingSource()
        async with sidecars("a") as (a,):
            source.instances = [a.instance.__class__(**{**table(a), "state": "draining", "drain": Drain()})]
            async with serving(source) as here:
                status, body = await here.call("DELETE", "/instances/a/drain")
                assert (status, body["error"]["message"]) == (409, "instance_id: 'a' drains by the list that lists it")

    run(test)


def test_the_list_has_precedence() -> None:
    """An instance that is listed later replaces the registered one of its id; the registered one comes back."""

    async def test() -> None:
        source = ChangingSource()
        async with sidecars("a") as (a,), serving(source) as here:
            await here.call("POST", "/instances", facts())
            source.instances = [a.instance]
            await until(lambda: _source(here, "list"))
            assert (await here.one("a"))["engine_url"] == a.instance.engine_url
            source.instances = []
            await until(lambda: _source(here, "http"))

    async def _source(here: Scene, name: str) -> bool:
        return (await here.one("a"))["source"] == name

    run(test)


def test_an_instance_that_is_not_renewed_expires() -> None:
    """As that of a trainer that died; each registration of the same facts renews it."""

    async def test() -> None:
        async with serving(Listed(())) as here:
            await here.call("POST", "/instances", facts("kept", ttl_s=1000))
            for _ in range(3):
                status, body = await here.call("POST", "/instances", facts("short", ttl_s=0.3))
                assert status in (200, 201)
                assert 0 < body["expires_in_s"] <= 0.3
            await until(lambda: _names(here, ["kept"]))

    async def _names(here: Scene, names: list[str]) -> bool:
        return await here.names() == names

    run(test)


def test_their_number_is_bounded() -> None:
    """The next one is refused, and one that is there is renewed."""

    async def test() -> None:
        async with serving(Listed(())) as here:
            await here.call("POST", "/instances", facts())
            one = here.driver.registered._registered.instances["a"]
            registered = here.driver.registered._registered  # filling it by HTTP would take long
            for number in range(1, MAX_REGISTERED):
                name = f"i{number}"
                other = replace(one.instance, instance_id=name, engine_url=f"http://127.0.0.1:{number}")
                registered.instances[name] = replace(one, instance=other)
            status, body = await here.call("POST", "/instances", facts("more"))
            assert (status, body["error"]["message"]) == (
                429, f"instances: {MAX_REGISTERED} are registered, which is the limit",
            )  # fmt: skip
            assert (await here.call("POST", "/instances", facts()))[0] == 200

    run(test)


def test_a_restart_keeps_them(tmp_path: Path) -> None:
    """Instances, their expiry, and orders to drain, also of listed instances, with their times."""

    async def test() -> None:
        path = tmp_path / "registered.json"
        async with sidecars("a", "b") as (a, b):
            async with serving(listed([a]), path) as here:
                await here.call("POST", "/instances", table(b, ttl_s=1000, role="decode"))
                await here.call("POST", "/instances", facts("c"))
                await here.call("DELETE", "/instances/c")
                await here.call("POST", "/instances/a/drain", {"deadline_s": 50})
                drains = here.driver.registry.drains()
            async with serving(listed([a]), path) as here:
                assert await here.names() == ["a", "b"]
                assert here.driver.registry.drains() == drains
                body = await here.one("b")
                assert body["role"] == "decode"
                assert 900 < body["expires_in_s"] <= 1000
                assert (await here.call("POST", "/instances", table(b, ttl_s=1000, role="decode")))[0] == 200

    run(test)


def test_schedulers_share_a_file(tmp_path: Path) -> None:
    """What one takes, the other one follows; changes at the same time are all made."""

    async def test() -> None:
        path = tmp_path / "registered.json"
        async with serving(Listed(()), path) as one, serving(Listed(()), path) as two:
            await one.call("POST", "/instances", facts())
            await until(lambda: _names(two, ["a"]))
            await two.call("POST", "/instances/a/drain", {"deadline_s": 5})
            await until(lambda: _state(one, "draining"))
            assert one.driver.registry.drains() == two.driver.registry.drains()
            scenes = [one, two] * 5
            replies = await asyncio.gather(
                *(here.call("POST", "/instances", facts(f"i{number}")) for number, here in enumerate(scenes))
            )
            assert [status for status, _ in replies] == [201] * 10
            names = sorted(["a", *(f"i{number}" for number in range(10))])
            for here in (one, two):
                await until(lambda here=here: _names(here, names))  # type: ignore[misc]
            assert json.loads(path.read_text())["version"] == 1

    async def _names(here: Scene, names: list[str]) -> bool:
        return await here.names() == names

    async def _state(here: Scene, state: str) -> bool:
        return (await here.one("a"))["state"] == state

    run(test)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2}', '{"version": 1, "instances": [{"instance_id": "a"}]}',
     '{"version": 1, "drains": {"a": {"deadline_s": -1}}}', '{"version": 1, "drains": {"a": []}}', "\x00" * 99,
     '{"version": 1, "drains": {"a": {"since_unix_s": "x"}}}', '{"version": 1, "drains": {"a": {"deadline_s": 0}}}'],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and the next change writes a whole one."""

    async def test() -> None:
        path = tmp_path / "registered.json"
        path.write_text(text)
        async with serving(Listed(()), path) as here:
            assert await here.names() == []
            lines = [one for one in caplog.records if "registered instances cannot be read" in one.message]
            assert len(lines) == 1
            assert (await here.call("POST", "/instances", facts()))[0] == 201
        async with serving(Listed(()), path) as here:
            assert await here.names() == ["a"]

    run(test)


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    """The change is refused, and not made."""

    async def test() -> None:
        folder = tmp_path / "file"
        folder.write_text("no folder")
        async with serving(Listed(()), folder / "registered.json") as here:
            status, body = await here.call("POST", "/instances", facts())
            assert status == 503
            assert body["error"]["message"].startswith("registered_file: cannot be written")
            assert await here.names() == []

    run(test)


def test_times_of_a_drain_are_checked() -> None:
    """On the wire and in files."""
    assert Drain(deadline_unix_s=5.0, force_unix_s=9.0).shifted(2.0) == Drain(deadline_unix_s=7.0, force_unix_s=11.0)
    for fields in (
        {"deadline_unix_s": math.nan},
        {"deadline_unix_s": -1},
        {"deadline_unix_s": 9.0, "force_unix_s": 8.0},
    ):
        with pytest.raises(ValueError, match=r"^drain\."):
            Drain(**fields)
    assert Drain(deadline_unix_s=time.time()).table().keys() == {"deadline_unix_s", "migrate"}
