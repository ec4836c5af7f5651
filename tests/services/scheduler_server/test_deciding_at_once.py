"""Simultaneous decisions of one scheduler and of two."""

from __future__ import annotations

import asyncio
from collections import Counter

from protos.block.v1 import common_pb2, predictor_pb2
from tests.services.scheduler_server.running import run, scheduler, until
from tests.services.stub_sidecars import sidecars


def test_the_second_of_two_decisions_sees_the_first() -> None:
    """A reservation since the forecast is noticed, and the request goes to another instance."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as one, scheduler(stubs) as two:
            await asyncio.gather(one.decide(dry_run=True), two.decide(dry_run=True))
            choices = await asyncio.gather(one.choose(), two.choose(request=two.request(request_id="other")))
            assert sorted(choices) == ["a", "b"]
            assert [len(stub.reserved_ids) for stub in stubs] == [1, 1]

    run(test)


def test_an_unknown_reservation_is_a_conflict() -> None:
    """The forecast in the reply replaces the old one, and the request goes to the instance that is better now."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:

            def another_reserves(response: predictor_pb2.PredictResponse) -> None:
                stubs[0].held["x"] = predictor_pb2.ReserveRequest()
                stubs[0].version = response.version + 1

            stubs[0].twist = another_reserves
            decision = await client.decide()
            assert decision.instance.instance_id == "b"
            assert "after 1 conflicts" in decision.why
            assert stubs[0].num_conflicts == 1

    run(test)


def test_after_enough_conflicts_a_request_is_placed_regardless() -> None:
    """The number of conflicts is limited, even if another reservation always comes first."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, max_conflicts=3) as client:
            stubs[0].always_conflicts = True
            decision = await client.decide()
            assert decision.HasField("reserved_for_s")
            assert "after 3 conflicts" in decision.why
            assert stubs[0].num_conflicts == 3
            assert client.count("block_reservations_total", result="conflict") == 3
            assert client.count("block_reservations_total", result="reserved") == 1

    run(test)


def test_two_schedulers_do_not_herd() -> None:
    """64 simultaneous requests over two schedulers onto 8 idle equal instances spread 8 each, give or take one."""

    async def test() -> None:
        async with sidecars(*"abcdefgh") as stubs, scheduler(stubs) as one, scheduler(stubs) as two:
            for _ in range(3):
                decisions = await asyncio.gather(
                    *((one, two)[number % 2].decide(one.request()) for number in range(64))
                )
                assert Counter(decision.instance.instance_id for decision in decisions).total() == 64
                assert all(7 <= len(stub.held) <= 9 for stub in stubs), [len(stub.held) for stub in stubs]
                assert all(decision.HasField("reserved_for_s") for decision in decisions)
                assert await asyncio.gather(*(two.release(decision) for decision in decisions)) == [True] * 64
                assert not any(stub.held for stub in stubs)
            max_conflicts = 10 * 3 * 64
            assert sum(stub.num_conflicts for stub in stubs) < max_conflicts

    run(test)


def test_one_scheduler_has_no_conflicts_with_itself() -> None:
    """Decisions in progress count each other's reservations before these are made."""

    async def test() -> None:
        async with sidecars(*"abcdefgh") as stubs, scheduler(stubs) as client:
            await asyncio.gather(*(client.decide() for _ in range(64)))
            assert all(7 <= len(stub.reserved_ids) <= 9 for stub in stubs), [len(stub.reserved_ids) for stub in stubs]

    run(test)


def test_the_same_request_twice_has_one_reservation() -> None:
    """A repeated call extends the reservation of the request."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            request = client.request()
            await client.decide(request)
            assert (await client.decide(request)).reserved_for_s == 10.0
            assert len(stubs[0].reserved_ids) == 1

    run(test)


def test_simultaneous_fan_outs_are_limited() -> None:
    """A burst does not make all sidecars late."""

    async def test() -> None:
        async with sidecars("a", streams=False) as stubs, scheduler(stubs, max_deciding=2) as client:
            stubs[0].hung = asyncio.Event()
            calls = [asyncio.ensure_future(client.decide()) for _ in range(6)]
            await until(lambda: client.count("block_grpc_requests_in_flight") == 6)
            await until(lambda: len(stubs[0].questions) == 2)
            await client.stub.Release(common_pb2.ReleaseRequest(request_id="x", instance_id="a"))
            assert len(stubs[0].questions) == 2
            stubs[0].hung.set()
            await asyncio.gather(*calls)

    run(test)
