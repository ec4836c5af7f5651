"""The live page's endpoints: files, events, decisions, keys."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack

import httpx
import pytest

from services.live_page.pages import FILES
from services.placement.tail import MAX_READERS
from tests.services.live_page.reading import TailOfPage, has, paged
from tests.services.security.key_files import key
from tests.services.waiting import LIMIT_S, run, until


def bearer(key: str) -> dict[str, str]:
    """Return the header with a key."""
    return {"authorization": f"Bearer {key}"}


def test_files_have_a_policy_and_load_nothing_from_elsewhere() -> None:
    """Every file is served with the headers of a page without inline scripts; none names another host."""

    async def test() -> None:
        async with paged() as here:
            for path in FILES:
                reply = await here.client.get(path)
                assert reply.status_code == 200, path
                assert "default-src 'none'; script-src 'self'" in reply.headers["content-security-policy"]
                assert reply.headers["x-content-type-options"] == "nosniff"
                assert not re.search(
                    r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|insertAdjacentHTML|\beval\(", reply.text
                )
                assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", reply.text) or path.endswith(
                    (".js", ".css")
                )

    run(test)


def test_a_page_sees_what_happens() -> None:
    """The first frame has the instances, later ones a placement, its end with both latencies, and counters."""

    async def test() -> None:
        async with paged() as here, here.tail() as tail:
            first = await tail.next()
            assert first["reset"]
            assert [one["id"] for one in first["instances"]] == ["a", "b"]
            assert (await here.post("one")).status_code == 200
            placed = (await tail.until(has("placed", "one")))["placed"][0]
            assert (placed["instance"], placed["candidates"], placed["policy"]) == ("a", 2, "block")
            assert placed["predicted_e2e_s"] >= 2.0
            if not has("ended", "one")(tail.frames[-1]):
                await tail.until(has("ended", "one"))
            (ended,) = tail.frames[-1]["ended"]
            assert ended["end"] in ("stop", "length")
            assert ended["e2e_s"] > 0
            frame = await tail.until(lambda frame: "counters" in frame)
            values = {(name, tuple(labels.values())): value for name, labels, value in frame["counters"]}
            assert values["block_decisions_total", ("block", "forecast")] == 1

    run(test)


def test_who_comes_later_sees_earlier_decisions() -> None:
    """Decisions made while nobody watched are there, marked as old; then the page follows their ends no more."""

    async def test() -> None:
        async with paged() as here:
            await here.post("earlier")
            async with here.tail() as tail:
                placed = (await tail.next())["placed"]
                assert [(one["id"], one["is_old"], one["prompt_tokens"] > 0) for one in placed] == [
                    ("earlier", True, True)
                ]

    run(test)


def test_a_decision_with_its_candidates() -> None:
    """A decision of the last ones has all candidates; an unknown id is 404, none 400."""

    async def test() -> None:
        async with paged() as here:
            await here.post("one two")
            found = (await here.client.get("/ui/decision", params={"request_id": "one two"})).json()
            assert [one["instance_id"] for one in found["candidates"]] == ["a", "b"]
            assert found["instance"]["instance_id"] == "a"
            assert found["candidates"][0]["fate"] == "forecast"
            assert found["candidates"][0]["indicators"]["num_running"] == 1
            assert (await here.client.get("/ui/decision", params={"request_id": "other"})).status_code == 404
            assert (await here.client.get("/ui/decision")).status_code == 400

    run(test)


def test_keys_are_asked_for() -> None:
    """With keys, the page's files are open, and its data are for operators."""

    async def test() -> None:
        async with paged(keys=[key("secret-1", "team"), key("secret-2", "boss", role="operator")]) as here:
            assert (await here.client.get("/ui")).status_code == 200
            for path in ("/ui/tail", "/ui/decision?request_id=one"):
                assert (await here.client.get(path)).status_code == 401
                assert (await here.client.get(path, headers=bearer("other"))).status_code == 401
                refused = await here.client.get(path, headers=bearer("secret-1"))
                assert (refused.status_code, "operator" in refused.json()["error"]["message"]) == (403, True)
            assert (await here.client.get("/ui/decision?request_id=one", headers=bearer("secret-2"))).status_code == 404
            async with here.tail(**bearer("secret-2")) as tail:
                assert (await tail.next())["reset"]

    run(test)


def test_readers_are_limited_and_instances_report_for_them_only() -> None:
    """One reader too many is refused; when the last has left, sidecars are watched no more."""

    async def test() -> None:
        async with paged() as here:
            async with here.tail() as tail:
                await tail.next()
                await until(lambda: all(one.watchers for one in here.sidecars))
                others = [here.client.stream("GET", "/ui/tail") for _ in range(MAX_READERS - 1)]
                responses = [await other.__aenter__() for other in others]
                assert {one.status_code for one in responses} == {200}
                assert (await here.client.get("/ui/tail")).status_code == 429
                for other in others:
                    await other.__aexit__(None, None, None)
            await until(lambda: not any(one.watchers for one in here.sidecars))
            metrics = (await here.client.get("/metrics")).text
            assert "block_gateway_clients_left_total 0.0" in metrics

    run(test)


def test_an_instance_that_stops_shows() -> None:
    """What an instance reports by itself reaches the page without any request."""

    async def test() -> None:
        async with paged() as here, here.tail() as tail:
            await tail.next()
            await until(lambda: bool(here.sidecars[1].watchers))
            await here.sidecars[1].crash()
            frame = await tail.until(lambda frame: any(one["state"] != "ready" for one in frame.get("instances", ())))
            assert [one["id"] for one in frame["instances"] if one["state"] != "ready"] == ["b"]
            await here.sidecars[1].start()

    run(test)


def test_an_open_page_does_not_delay_a_shutdown() -> None:
    """The stream ends when the server drains, however long it would wait for requests."""

    async def test() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=LIMIT_S))
            async with paged(drain_s=10 * LIMIT_S) as here:
                url = here.client.base_url.join("/ui/tail")
                response = await stack.enter_async_context(client.stream("GET", url))
                tail = TailOfPage(lines=response.aiter_lines())
                await tail.next()
            with pytest.raises(EOFError):
                await tail.until(lambda _: False)

    run(test)
