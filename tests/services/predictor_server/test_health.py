"""A sidecar beside an engine that its reserved requests do not reach, or whose steps are long ago."""

from __future__ import annotations

from pathlib import Path

from protos.block.v1 import common_pb2
from tests.services.engine_state.files import busy, writer_at
from tests.services.predictor_server.running_sidecars import (
    NEVER_S,
    READY,
    SidecarClient,
    idle_engine,
    request,
    run,
    sidecar_of,
)

DRAINING = common_pb2.INSTANCE_STATE_DRAINING
SHORT_S = 0.01


async def let_reservations_expire(client: SidecarClient, number: int) -> None:
    """Make reservations, one after the other, for requests that are never sent."""
    for index in range(number):
        await client.reserve(request(f"v{index}"), ttl_s=SHORT_S)
        await client.until(lambda response: response.indicators.num_reserved == 0)


def test_an_engine_that_its_requests_do_not_reach_is_draining_until_one_does(tmp_path: Path) -> None:
    """An engine that hangs without requests seems idle; only expired reservations show that it hangs."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            await let_reservations_expire(client, 2)
            assert (await client.predict(request())).state == READY
            assert client.sample("block_engine_up") == 1
            await let_reservations_expire(client, 1)
            hanging = await client.until(lambda response: response.state == DRAINING)
            assert not hanging.predictions
            assert client.sample("block_engine_up") == 0
            busy(writer)
            await client.until(lambda response: response.state == READY)
            assert client.sample("block_engine_up") == 1
            assert (await client.predict(request())).predictions[0].HasField("forecast")

    run(test())
    writer.close()


def test_expired_reservations_are_harmless_while_other_requests_arrive(tmp_path: Path) -> None:
    """Then the clients that sent nothing are at fault, and not the engine."""
    writer = idle_engine(tmp_path / "state")

    async def test() -> None:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S) as client:
            await let_reservations_expire(client, 2)
            busy(writer)
            await client.until(lambda response: response.indicators.num_running == 2)
            await let_reservations_expire(client, 2)
            assert (await client.predict()).state == READY

    run(test())
    writer.close()


def test_an_old_pace_is_forgotten(tmp_path: Path) -> None:
    """An engine that was slow gets no requests, so it could never show that it has recovered."""
    writer = busy(writer_at(tmp_path / "state"))

    async def pace_and_e2e_s(forget_s: float) -> tuple[float, float]:
        async with sidecar_of(tmp_path / "state", stall_s=NEVER_S, forget_s=forget_s) as client:
            response = await client.until(lambda response: (response.indicators.pace == 1) == (forget_s < NEVER_S))
            return response.indicators.pace, (await client.forecast(request())).e2e_s

    async def test() -> None:
        slow, slow_e2e_s = await pace_and_e2e_s(NEVER_S)
        pace, e2e_s = await pace_and_e2e_s(SHORT_S)
        assert slow > pace == 1
        assert slow_e2e_s > e2e_s

    run(test())
    writer.close()
