"""A provisioner with tiers in a whole cluster: instances move between tiers while requests are placed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from protos.block.v1 import provisioner_pb2 as pb
from services.cluster import Child
from services.provisioner_server.hooks.process import Processes
from services.provisioner_server.journal import entries
from tests.services.provisioner_server.test_live import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each is a dozen processes

# Targets that a machine ten times slower keeps: the tiers follow from them alone.
ENGINE = (
    "--profile llama-2-7b-a30 --served-model-name tiny --max-num-seqs 8 --max-model-len 512 --num-gpu-blocks 257 "
    "--drain-s 60"
)
TIERS = '[[tier]]\nname = "strict"\ntpot_slo_s = 1.0\nmin_instances = 1\n\n[[tier]]\nname = "loose"\ntpot_slo_s = 8.0\n'
NUM = 3


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[tuple[Child, Child]]:
    """Run a provisioner with tiers and three instances, and a scheduler; the instances end with the block."""
    (folder / "tiers.toml").write_text(TIERS)
    provisioner = Child(
        "provisioner", "provisioner", "--folder", str(folder), "--model", "tiny", "--min-instances", str(NUM),
        "--max-instances", str(NUM), "--tick-s", "0.2", "--settle-s", "0.5", "--tiers", str(folder / "tiers.toml"),
        "--rule", "tiers", "--tier-hold-s", "0.5", "--engine-flags", ENGINE, "--sidecar-flags", "--stall-s 60",
    )  # fmt: skip
    started = [provisioner]
    try:
        await provisioner.start()
        await until(lambda: len(roster(folder)) == NUM and "strict" in tiers(folder).values(), "instances and a tier")
        scheduler = Child(
            "scheduler", "scheduler", "--instances-file", str(folder / "instances.json"), "--poll-s", "0.1",
            "--sidecar-deadline-ms", "10000", "--provisioner", f"127.0.0.1:{provisioner.port}", "--policy",
            "polyserve: promotion = 0", "--constant-tokens", "12",
        )  # fmt: skip
        started.append(scheduler)
        await scheduler.start()
        yield provisioner, scheduler
    finally:
        for child in reversed(started):
            await child.stop()
        hook = Processes(folder / "instances", end_s=1.0)
        names = [path.parent.name for path in (folder / "instances").glob("*/instance.json")]
        await hook.act(pb.Action(kind=pb.ACTION_KIND_STOP, instance_ids=names))


def roster(folder: Path) -> list[dict[str, str]]:
    """The instances, as the provisioner has them on the disk."""
    path = folder / "roster.json"
    return json.loads(path.read_text()) if path.exists() else []


def tiers(folder: Path) -> dict[str, str]:
    """The tier of each instance; a duplicate name fails."""
    found = [(one["instance_id"], one["tier"]) for one in roster(folder)]
    assert len(dict(found)) == len(found)
    return dict(found)


def moves(folder: Path) -> list[pb.Action]:
    """The moves so far, each in its last state."""
    path = folder / "journal.jsonl"
    latest = {entry.action.action_id: entry.action for entry in entries(path)} if path.exists() else {}
    return [action for action in latest.values() if action.kind == pb.ACTION_KIND_MOVE]


class Load:
    """Clients of a scheduler that send one request after the other with some target."""

    def __init__(self, address: str) -> None:
        """Send nothing yet."""
        self.num_sent = self.num_ended = 0
        self.failures: list[str] = []
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def one(self, tpot_s: float) -> None:
        """Send a request, and follow its answer to the end."""
        self.num_sent += 1
        request = common_pb2.Request(
            request_id=f"r{self.num_sent}", model="tiny", prompt_tokens=8, max_tokens=12, ignore_eos=True,
            slo=common_pb2.Slo(ttft_s=200.0, tpot_s=tpot_s),
        )  # fmt: skip
        message = scheduler_pb2.GenerateRequest(request=request, prompt="Tell me a story")
        try:
            events = [event async for event in self._stub.Generate(message, timeout=240)]
            if not events[-1].HasField("outcome"):
                self.failures.append(f"no outcome: {events[-1]}")
        except grpc.aio.AioRpcError as error:
            self.failures.append(str(error.details()))
        self.num_ended += 1

    @asynccontextmanager
    async def running(self, tpot_s: float, clients: int) -> AsyncIterator[None]:
        """Keep some clients busy while the block runs; at its end all requests have ended."""
        stopping = asyncio.Event()

        async def client() -> None:
            while not stopping.is_set():
                await self.one(tpot_s)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(client())
            try:
                yield
            finally:
                stopping.set()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()


def test_instances_move_between_tiers_while_requests_are_placed_and_a_provisioner_is_killed(tmp_path: Path) -> None:
    """No request fails, and no instance is lost or in two tiers; a provisioner killed during moves continues them."""

    async def test() -> None:
        async with living(tmp_path) as (provisioner, scheduler):
            load = Load(f"127.0.0.1:{scheduler.port}")
            instances = set(tiers(tmp_path))
            async with load.running(8.0, clients=3):
                await until(lambda: "loose" in tiers(tmp_path).values() and load.num_ended > 3, "a loose tier")
            assert list(tiers(tmp_path).values()).count("strict") >= 1
            for _ in range(2):
                await until(lambda: sorted(tiers(tmp_path).values()) == ["", "", "strict"], "tiers at their minimum")
                num_moves, pid = len(moves(tmp_path)), provisioner.pid
                async with load.running(1.0, clients=2), load.running(8.0, clients=2):
                    await until(lambda num=num_moves: len(moves(tmp_path)) > num, "a move")
                    os.kill(pid, signal.SIGKILL)
                    await until(lambda pid=pid: provisioner.pid != pid and provisioner.serves, "a restart")
                    num_ended = load.num_ended
                    await until(lambda num=num_ended: load.num_ended > num + 4, "answers after the restart")
                    assert set(tiers(tmp_path)) == instances
            await until(lambda: sorted(tiers(tmp_path).values()) == ["", "", "strict"], "tiers at their minimum again")
            assert load.failures == []
            assert load.num_ended == load.num_sent
            assert all(action.why for action in moves(tmp_path))
            await until(lambda: {one.state for one in moves(tmp_path)} == {pb.ACTION_STATE_DONE}, "the end of moves")
            assert set(tiers(tmp_path)) == instances
            await load.close()

    asyncio.run(test())
