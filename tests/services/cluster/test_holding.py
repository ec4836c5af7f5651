"""A running cluster whose schedulers hold requests in the admission queue until an engine has capacity."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.block.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.services.cluster.living import ENGINES, NUM_ENGINES, NUM_SEATS, SCHEDULERS, Living, is_none, is_some
from tests.services.cluster.loading import loaded
from tests.services.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

CLIENTS = 2 * NUM_ENGINES * NUM_SEATS
SOME = 3 * CLIENTS
SLOW = 5.0  # so that max_num_seqs is the bottleneck, and not the CPU of this machine


@asynccontextmanager
async def deciding_by(live: Living, policy: str) -> AsyncIterator[None]:
    """Switch all schedulers to a policy while the block runs."""
    before = [await switched(live, name, policy) for name in SCHEDULERS]
    try:
        yield
    finally:
        for name, text in zip(SCHEDULERS, before, strict=True):
            await switched(live, name, text)


async def switched(live: Living, scheduler: str, policy: str) -> str:
    """Switch a scheduler to a policy; return the policy before."""
    async with grpc.aio.insecure_channel(live.cluster.address_of(scheduler)) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        answer: scheduler_pb2.UsePolicyResponse = await stub.UsePolicy(scheduler_pb2.UsePolicyRequest(policy=policy))
    return answer.before


def test_requests_wait_at_both_schedulers_and_not_in_engines(live: Living) -> None:
    """With more clients than max_num_seqs all are served, some after being held; then no request is held."""

    async def test() -> None:
        for engine in ENGINES:
            await live.order(engine, slow=SLOW)
        async with deciding_by(live, "hold"), loaded(live.gateway, clients=CLIENTS) as load:
            for name in SCHEDULERS:
                await live.until_metric(name, "block_holds_total", is_some, end="admitted")
            await until(lambda: load.served_since(0) >= SOME)
        for engine in ENGINES:
            await live.order(engine)
        assert load.failures() == []
        assert {result.instance for result in load.results} == {*ENGINES}
        for name in SCHEDULERS:
            await live.until_metric(name, "block_held_requests", is_none)

    live.run(test())
