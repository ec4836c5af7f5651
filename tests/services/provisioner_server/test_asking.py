"""`block provision` against a provisioner that serves: what there is, what would be done and why, what was done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos.block.v1 import provisioner_pb2_grpc
from services.provisioner_server.service import ProvisionerService
from tests.services.cli.running import block, refusal
from tests.services.provisioner_server.acting import Noting, leader
from tests.services.waiting import run, until

START = "fewer instances than min_instances 2"
QUIET = "no requests observed yet"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, Noting]]:
    """Serve a leader that was not asked to look yet; give its address, and the hook."""
    hook = Noting(set())
    one = leader(folder, hook)
    server = grpc.aio.server()
    provisioner_pb2_grpc.add_ProvisionerServicer_to_server(ProvisionerService(one._pool, one), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    looking = asyncio.create_task(_looking(one))
    try:
        yield f"127.0.0.1:{port}", hook
    finally:
        looking.cancel()
        await server.stop(None)
        await one.close()


async def _looking(one: object) -> None:
    while True:
        await one.tick()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)


async def said(*arguments: str) -> str:
    """Run a command that must end well, in a thread; return its standard output."""
    done = await asyncio.to_thread(block, "provision", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_operator_sees_what_there_is_what_was_done_and_why(tmp_path: Path) -> None:
    """Two instances are started and ready; nothing more is to be done, and it is said why not."""

    async def test() -> None:
        async with served(tmp_path) as (address, hook):
            await until(lambda: len(hook.world) == 2, what="two instances")

            async def is_done() -> bool:
                return "(done, headroom)" in await said("history", "--address", address)

            await until(is_done, what="the end of the start")
            history = (await said("history", "--address", address)).splitlines()
            assert all(START in line for line in history)
            assert [line.partition("(")[2].partition(",")[0] for line in history] == ["written", "called", "done"]
            status = await said("status", "--address", address)
            assert "leader one, queried one" in status
            assert "headroom, 2 instances, 2 desired (2 to 4)" in status
            assert "default-1-0" in status
            assert await said("plan", "--address", address) == f"nothing: {QUIET}\n"
            plan = json.loads(await said("plan", "--address", address, "--json"))
            assert plan["actions"] == []
            assert plan["why"] == QUIET
            other = await said("plan", "--address", address, "--rule", "preempt")
            assert other == "nothing: the worst forecast, 0.0 s, is below the threshold of 70 s\n"

    run(test)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("status", "--address", "nowhere"), "address: 'nowhere' must be host:port"),
        (("plan", "--rule", "wishful"), "rule: 'wishful' is none of headroom, preempt, relief, schedule"),
        (("plan", "--rule", "schedule"), "schedule: "),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    """One line, whether it is the command or the provisioner that refuses."""

    async def test() -> None:
        async with served(tmp_path) as (address, _):
            asked = [*arguments] if "--address" in arguments else [*arguments, "--address", address]
            assert complaint in await asyncio.to_thread(refusal, "provision", *asked)

    run(test)
