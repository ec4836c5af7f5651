"""The live page of a gateway whose schedulers are other processes."""

from __future__ import annotations

import asyncio
import json

import httpx
from prometheus_client import CollectorRegistry

from services.gateway.scheduler_tails import MAX_FRAMES, SchedulerTails
from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.rpc.errors import UnknownNameError
from services.rpc.grpc_channel import GrpcChannel
from services.rpc.settings import ServerSettings
from tests.services.live_page.reading import TailOfPage, has
from tests.services.scheduler_server.running import scheduler
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import LIMIT_S, run


def test_frames_of_several_schedulers_are_merged() -> None:
    """Each frame says which scheduler it is from; none resets what the others said; decisions are found anywhere."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as one, scheduler(stubs) as two:
            addresses = [f"127.0.0.1:{client.port}" for client in (one, two)]
            channels = {address: GrpcChannel(address) for address in addresses}
            tails = SchedulerTails(channels, CollectorRegistry())
            try:
                with tails.watched() as reader:
                    frames = reader.frames()
                    first = json.loads(await anext(frames))
                    assert first["reset"]
                    assert "instances" not in first
                    whole = set()
                    while whole != set(addresses):
                        frame = json.loads(await anext(frames))
                        assert "reset" not in frame
                        if frame.get("all"):
                            assert [instance["id"] for instance in frame["instances"]] == ["a", "b"]
                            whole.add(frame["from"])
                    await two.decide(two.request(request_id="mine"))
                    while True:
                        frame = json.loads(await anext(frames))
                        if frame.get("placed"):
                            break
                    assert (frame["from"], frame["placed"][0]["id"]) == (addresses[1], "mine")
                    await frames.aclose()
                assert len((await tails.explain("mine")).candidates) == 2
                try:
                    await tails.explain("other")
                    raise AssertionError
                except UnknownNameError:
                    pass
            finally:
                for channel in channels.values():
                    await channel.close()

    run(test)


def test_a_reader_that_is_too_slow_starts_over() -> None:
    """Frames that nobody reads are bounded; afterwards the scheduler's whole state comes again."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as one:
            address = f"127.0.0.1:{one.port}"
            channel = GrpcChannel(address)
            tails = SchedulerTails({address: channel}, CollectorRegistry())
            try:
                with tails.watched() as reader:
                    for _ in range(2 * MAX_FRAMES):
                        reader.put({"now": 0})
                    frames = reader.frames()
                    num_read = 0
                    while not json.loads(await anext(frames)).get("all"):
                        num_read += 1
                    assert num_read <= 2 * MAX_FRAMES
                    await frames.aclose()
            finally:
                await channel.close()
                await asyncio.sleep(0)

    run(test)


def test_a_gateway_shows_its_schedulers_and_its_own_counters() -> None:
    """The page of a gateway with a remote scheduler has the instances of that, and what only the gateway counts."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as one:
            settings = GatewaySettings(schedulers=(f"127.0.0.1:{one.port}",))
            async with serving(settings, ServerSettings()) as here:
                client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{here.port}", timeout=LIMIT_S)
                async with client, client.stream("GET", "/ui/tail") as response:
                    tail = TailOfPage(lines=response.aiter_lines())
                    frame = await tail.until(lambda frame: frame.get("all"))
                    assert [instance["id"] for instance in frame["instances"]] == ["a", "b"]
                    frame = await tail.until(lambda frame: frame.get("from") == "gateway")
                    assert ["block_gateway_requests_under_way", {}, 0.0] in frame["counters"]
                    await one.decide(one.request(request_id="there"))
                    await tail.until(has("placed", "there"))
                    found = (await client.get("/ui/decision", params={"request_id": "there"})).json()
                    assert len(found["candidates"]) == 2
                    assert (await client.get("/ui/decision", params={"request_id": "other"})).status_code == 404

    run(test)
