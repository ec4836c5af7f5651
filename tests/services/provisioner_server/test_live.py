"""A provisioner with the `process` hook in a whole cluster: it grows in a burst of requests, and shrinks again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from protos.block.v1 import common_pb2, provisioner_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from protos.block.v1 import provisioner_pb2 as pb
from services.cluster import Child
from services.provisioner_server.hooks.process import Processes
from tests.services.cluster.loading import loaded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each is a dozen processes

PATIENCE_S = 240.0
NEW = "default-2-"  # prefix of the instances of the second action
ENGINE = (
    "--profile llama-2-7b-a30 --served-model-name tiny --speed 2 --max-num-seqs 8 --max-model-len 512 "
    "--num-gpu-blocks 257 --drain-s 60"
)


async def until(holds: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        answer = holds()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.2)


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[tuple[Child, Child, Child]]:
    """Run a provisioner, a scheduler and a gateway; the instances, which outlive the provisioner, end with the block."""
    provisioner = Child(
        "provisioner", "provisioner", "--folder", str(folder), "--model", "tiny", "--min-instances", "2",
        "--max-instances", "5", "--cooldown-s", "1", "--calm-s", "4", "--cold-start-s", "5", "--threshold-s", "3",
        "--seats", "8", "--tick-s", "0.5", "--settle-s", "1.5", "--engine-flags", ENGINE, "--sidecar-flags",
        "--stall-s 60",
    )  # fmt: skip
    started = [provisioner]
    try:
        await provisioner.start()
        await until((folder / "instances.json").exists, "a list of instances")
        scheduler = Child(
            "scheduler", "scheduler", "--instances-file", str(folder / "instances.json"), "--poll-s", "0.2",
            "--sidecar-deadline-ms", "10000", "--provisioner", f"127.0.0.1:{provisioner.port}",
            "--constant-tokens", "60",
        )  # fmt: skip
        started.append(scheduler)
        await scheduler.start()
        gateway = Child(
            "gateway", "gateway", "--scheduler", f"127.0.0.1:{scheduler.port}", "--schedule-s", "20",
            "--first-byte-s", "120", "--idle-s", "60",
        )  # fmt: skip
        started.append(gateway)
        await gateway.start()
        yield provisioner, scheduler, gateway
    finally:
        for child in reversed(started):
            await child.stop()
        hook = Processes(folder / "instances", end_s=1.0)
        names = [path.parent.name for path in (folder / "instances").glob("*/instance.json")]
        await hook.act(pb.Action(kind=pb.ACTION_KIND_STOP, instance_ids=names))


def test_a_burst_makes_a_cluster_grow_and_it_shrinks_again_without_a_failed_request(tmp_path: Path) -> None:
    """From two instances to five and back to two; no request fails, and every action has its reason."""

    async def test() -> None:
        async with (
            living(tmp_path) as (provisioner, scheduler, gateway),
            grpc.aio.insecure_channel(f"127.0.0.1:{provisioner.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{scheduler.port}") as to_scheduler,
        ):
            stub = provisioner_pb2_grpc.ProvisionerStub(channel)

            async def num_ready() -> int:
                (pool,) = (await stub.Status(pb.StatusRequest(), timeout=30)).pools
                return sum(one.state == common_pb2.INSTANCE_STATE_READY for one in pool.instances)

            async def has(num: int) -> bool:
                return await num_ready() == num

            async def knows_two() -> bool:
                call = scheduler_pb2_grpc.SchedulerStub(to_scheduler).ListInstances
                return len((await call(scheduler_pb2.ListInstancesRequest(), timeout=30)).instances) == 2

            url = f"http://127.0.0.1:{gateway.port}"
            await until(partial(has, 2), "two instances")
            await until(knows_two, "two instances at the scheduler, which reads their file from time to time")
            async with loaded(url, clients=90, output_tokens=60, most=100_000) as load:
                await until(lambda: load.served_since(0) > 0, "a first answer")
                await until(partial(has, 5), "five instances")
                await until(lambda: any(one.instance.startswith(NEW) for one in load.results), "an answer of a new one")
            burst = list(load.results)
            async with loaded(url, clients=1, output_tokens=60, most=100_000) as quiet:
                await until(partial(has, 2), "two instances again")
                await until(lambda: len(json.loads((tmp_path / "roster.json").read_text())) == 2, "nobody left over")
            assert [(one.failure, one.note) for one in burst + quiet.results if one.failure is not None] == []
            assert {result.instance for result in burst} >= {"default-1-0", "default-1-1"}
            actions = [entry.action async for entry in stub.History(pb.HistoryRequest(), timeout=30)]
            assert all(action.why for action in actions)
            last = {action.action_id: action for action in actions}
            assert {action.state for action in last.values()} == {pb.ACTION_STATE_DONE}
            for action_id in last:
                mine = [action.state for action in actions if action.action_id == action_id]
                assert mine[0] == pb.ACTION_STATE_WRITTEN
            (pool,) = (await stub.Status(pb.StatusRequest(), timeout=30)).pools
            assert pool.cold_start_s > 0

    asyncio.run(test())
