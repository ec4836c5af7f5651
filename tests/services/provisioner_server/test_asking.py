"""`block provision` against a running provisioner: status, plan and history."""

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
from tests.services.provisioner_server.acting import RecordingHook, leader
from tests.services.waiting import run, until

START = "fewer instances than min_instances 2"
QUIET = "no requests observed yet"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, RecordingHook]]:
    """Serve a leader that runs its ticks; its address, and the hook."""
    hook = RecordingHook(set())
    one = leader(folder, hook)
    server = grpc.aio.server()
    provisioner_pb2_grpc.add_ProvisionerServicer_to_server(ProvisionerService(one._pool, one), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ticking = asyncio.create_task(_ticking(one))
    try:
        yield f"127.0.0.1:{port}", hook
    finally:
        ticking.cancel()
        await server.stop(None)
        await one.close()


async def _ticking(one: object) -> None:
    while True:
        await one.tick()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)


async def output_of(*arguments: str) -> str:
    """Run a command that must succeed, in a thread; return its standard output."""
    done = await asyncio.to_thread(block, "provision", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_operator_sees_status_plan_and_history_with_reasons(tmp_path: Path) -> None:
    """Two instances are started and ready; nothing more is planned, with a reason."""

    async def test() -> None:
        async with served(tmp_path) as (address, hook):
            await until(lambda: len(hook.running) == 2, what="two instances")

            async def is_done() -> bool:
                return "(done, headroom)" in await output_of("history", "--address", address)

            await until(is_done, what="the end of the start")
            history = (await output_of("history", "--address", address)).splitlines()
            assert all(START in line for line in history)
            assert [line.partition("(")[2].partition(",")[0] for line in history] == ["written", "called", "done"]
            status = await output_of("status", "--address", address)
            assert "leader one, queried one" in status
            assert "headroom, 2 instances, 2 desired (2 to 4)" in status
            assert "default-1-0" in status
            assert await output_of("plan", "--address", address) == f"nothing: {QUIET}\n"
            plan = json.loads(await output_of("plan", "--address", address, "--json"))
            assert plan["actions"] == []
            assert plan["why"] == QUIET
            other = await output_of("plan", "--address", address, "--rule", "preempt")
            assert other == "nothing: the worst forecast, 0.0 s, is below the threshold of 70 s\n"

    run(test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "--address", "nowhere"), "address: 'nowhere' must be host:port"),
        (
            ("plan", "--rule", "wishful"),
            "rule: must be one of headroom, preempt, relief, tiers, schedule, not 'wishful'",
        ),
        (("plan", "--rule", "schedule"), "schedule: "),
        (("plan", "--rule", "tiers"), "rule: tiers needs a file of them"),
    ],
)
def test_bad_arguments_are_refused_by_name(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """One line, whether the command or the provisioner refuses."""

    async def test() -> None:
        async with served(tmp_path) as (address, _):
            words = [*arguments] if "--address" in arguments else [*arguments, "--address", address]
            assert message in await asyncio.to_thread(refusal, "provision", *words)

    run(test)
