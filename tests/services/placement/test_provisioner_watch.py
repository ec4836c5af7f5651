"""What the live page receives of provisioners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos.block.v1 import common_pb2, provisioner_pb2, provisioner_pb2_grpc
from services.placement.provisioner_watch import ProvisionerWatch
from tests.services.gateway.stubs import unreachable
from tests.services.waiting import run, until


class StubProvisioner(provisioner_pb2_grpc.ProvisionerServicer):
    """One pool, a plan of one action, and one past action."""

    async def Status(self, request: provisioner_pb2.StatusRequest, context: Any) -> provisioner_pb2.StatusResponse:
        """Return the pool."""
        states = (common_pb2.INSTANCE_STATE_READY, common_pb2.INSTANCE_STATE_READY, common_pb2.INSTANCE_STATE_STARTING)
        pool = provisioner_pb2.PoolStatus(
            pool="main", num_desired=3, min_instances=1, max_instances=5, forecast_p99_e2e_s=float("inf"),
            instances=[common_pb2.Instance(instance_id=str(number), state=state) for number, state in enumerate(states)],
        )  # fmt: skip
        return provisioner_pb2.StatusResponse(pools=[pool])

    async def Plan(self, request: provisioner_pb2.PlanRequest, context: Any) -> provisioner_pb2.PlanResponse:
        """Return the plan."""
        action = provisioner_pb2.Action(kind=provisioner_pb2.ACTION_KIND_START, num_instances=2, why="more arrivals")
        return provisioner_pb2.PlanResponse(actions=[action])

    async def History(
        self, request: provisioner_pb2.HistoryRequest, context: Any
    ) -> AsyncIterator[provisioner_pb2.HistoryResponse]:
        """Yield the past action."""
        action = provisioner_pb2.Action(
            kind=provisioner_pb2.ACTION_KIND_DRAIN, state=provisioner_pb2.ACTION_STATE_DONE, instance_ids=["7"]
        )
        yield provisioner_pb2.HistoryResponse(action=action, at_unix_s=5.0)


def test_the_first_provisioner_that_replies() -> None:
    """Its pools by state, what it plans, and what it did; nothing is kept once nobody follows."""

    async def test() -> None:
        server = grpc.aio.server()
        provisioner_pb2_grpc.add_ProvisionerServicer_to_server(StubProvisioner(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        watch = ProvisionerWatch([unreachable().removeprefix("http://"), f"127.0.0.1:{port}"])
        following = asyncio.create_task(watch.follow())
        await until(lambda: watch.record is not None)
        record = watch.record
        assert record is not None
        (pool,) = record["pools"]
        assert [pool[name] for name in ("desired", "ready", "starting", "draining", "min", "max")] == [3, 2, 1, 0, 1, 5]
        assert (pool["forecast_p99_s"], pool["cold_start_s"]) == (None, None)
        assert [(one["kind"], one["state"], one["num"]) for one in record["actions"]] == [
            ("start", "planned now", 2),
            ("drain", "done", 1),
        ]
        following.cancel()
        await asyncio.wait([following])
        assert watch.record is None
        await server.stop(None)

    run(test)


def test_without_a_provisioner() -> None:
    """An unreachable one is said to be so; without any there is nothing to tell."""

    async def test() -> None:
        await ProvisionerWatch([]).follow()
        watch = ProvisionerWatch([unreachable().removeprefix("http://")])
        following = asyncio.create_task(watch.follow())
        await until(lambda: watch.record is not None)
        assert watch.record is not None
        assert watch.record["error"].startswith("no provisioner replies")
        following.cancel()
        await asyncio.wait([following])

    run(test)
