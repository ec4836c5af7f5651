"""The live page of a gateway whose schedulers are other processes."""

from __future__ import annotations

import asyncio
import json

from prometheus_client import CollectorRegistry

from services.gateway.scheduler_tails import MAX_FRAMES, SchedulerTails
from services.rpc.errors import UnknownNameError
from services.rpc.grpc_channel import GrpcChannel
from tests.services.scheduler_server.running import scheduler
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import run


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
