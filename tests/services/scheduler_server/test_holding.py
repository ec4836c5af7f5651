"""Requests that are held at a scheduler until an instance admits them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos.block.v1 import common_pb2, provisioner_pb2_grpc, scheduler_pb2
from services.provisioner_server.pool import Pool
from services.provisioner_server.service import ProvisionerService
from tests.services.provisioner_server.acting import RecordingHook, leader
from tests.services.scheduler_server.running import Client, refused, run, scheduler, until
from tests.services.stub_sidecars import StubSidecar, sidecars

LONG_HOLD = "hold: hold_s = 1000"
TWO_EACH = 'hold: hold = "predicted_queue_s < 1.5 and predicted_preemptions < 1", hold_s = 1000'
HELD = "block_held_requests"


@asynccontextmanager
async def admitting_two(*names: str) -> AsyncIterator[list[StubSidecar]]:
    """Serve instances that admit two requests each by the policy above: each reservation delays others by a second."""
    async with sidecars(*names) as stubs:
        for stub in stubs:
            stub.per_reservation_s = 1.0
        yield list(stubs)


async def held(client: Client, number: int) -> None:
    """Wait until this number of requests is held."""
    await until(lambda: client.count(HELD) == number)


async def ended(client: Client, end: str) -> float:
    """Count the holds that ended in a way."""
    return client.count("block_holds_total", end=end)


def test_a_request_is_held_until_an_instance_admits_it() -> None:
    """Two are placed at once, the third when one of them has ended; its decision has the time that it was held."""

    async def test() -> None:
        async with admitting_two("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
            first, second = await client.decide(), await client.decide()
            assert "held" not in first.why + second.why
            assert client.count("block_held_seconds_count") == 0
            third = asyncio.create_task(client.decide())
            await held(client, 1)
            assert stub.reserved_ids == ["r1", "r2"]
            await client.release(first)
            decision = await third
            assert stub.reserved_ids == ["r1", "r2", "r3"]
            assert "; held " in decision.why
            assert "not admitted" not in decision.why
            explained = await client.stub.Explain(scheduler_pb2.ExplainRequest(request_id="r3"))
            assert explained.decision.why == decision.why
            assert client.count(HELD) == 0
            assert client.count("block_held_seconds_count") == 1
            assert await ended(client, "admitted") == 1

    run(test)


def test_held_requests_are_placed_in_the_order_of_arrival() -> None:
    """Each release lets the next request be placed."""

    async def test() -> None:
        async with admitting_two("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
            decided = [await client.decide(), await client.decide()]
            waiting = []
            for number in range(1, 7):
                waiting.append(asyncio.create_task(client.decide()))
                await held(client, number)
            for task in waiting:
                await client.release(decided.pop(0))
                decided.append(await task)
            assert stub.reserved_ids == [f"r{number}" for number in range(1, 9)]

    run(test)


def test_the_time_of_a_hold_is_limited() -> None:
    """After it a request goes to the best instance, admitted or not."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="hold: hold_s = 0.3") as client:
            for stub in stubs:
                stub.per_reservation_s = 10.0
            stubs[1].e2e_s = 9.0
            assert [await client.choose(), await client.choose()] == ["a", "b"]
            late = await client.decide()
            assert "not admitted by any instance" in late.why
            assert late.instance.instance_id == "a"
            assert await ended(client, "not_admitted") == 1

    run(test)


def test_a_caller_with_a_deadline_gets_a_decision_in_time() -> None:
    """Its request is held for at most a part of the remaining time."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=LONG_HOLD) as client:
            stub.per_reservation_s = 10.0
            await client.decide()
            message = scheduler_pb2.ScheduleRequest(request=client.request())
            late = (await client.stub.Schedule(message, timeout=20)).decision
            assert "not admitted by any instance" in late.why

    run(test)


def test_a_caller_with_less_time_than_the_policy_holds_requests_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests are refused or placed too early; the line says which time its gateway needs."""

    async def test() -> None:
        for policy, wait_s, needed in (
            ("slo: hold_s = 0.01", 50.0, "75"), ("hold", 5.0, "12.5"), ("hold", 12.5, ""), ("block", 20.0, ""),
        ):  # fmt: skip
            caplog.clear()
            async with sidecars("a") as stubs, scheduler(stubs, policy=policy, sidecar_deadline_s=0.05) as client:
                await client.decide()
                assert not caplog.records, "it has no deadline"
                for _ in range(2):
                    message = scheduler_pb2.ScheduleRequest(request=client.request())
                    await client.stub.Schedule(message, timeout=wait_s)
                warned = [one.fields for one in caplog.records if "less time than the policy holds" in one.message]
                assert [one["set_in_gateway"] for one in warned] == ([f"--schedule-s {needed}"] if needed else [])

    run(test)


def test_a_full_queue_releases_its_first_request() -> None:
    """The queue is bounded, and no request is refused."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=LONG_HOLD, max_held=2) as client:
            stub.per_reservation_s = 10.0
            await client.decide()
            waiting = []
            for number in (1, 2):
                waiting.append(asyncio.create_task(client.decide()))
                await held(client, number)
            waiting.append(asyncio.create_task(client.decide()))
            first = await waiting[0]
            assert "not admitted by any instance" in first.why
            assert client.count(HELD) == 2
            stub.per_reservation_s = 0.0
            await asyncio.gather(*waiting)
            assert stub.reserved_ids == ["r1", "r2", "r3", "r4"]

    run(test)


def test_a_cancelled_request_leaves_the_queue() -> None:
    """It gets no reservation, and the next request has its turn."""

    async def test() -> None:
        async with admitting_two("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
            first = await client.decide()
            await client.decide()
            leaving = asyncio.create_task(client.decide())
            await held(client, 1)
            staying = asyncio.create_task(client.decide())
            await held(client, 2)
            leaving.cancel()
            await held(client, 1)
            await client.release(first)
            await staying
            assert stub.reserved_ids == ["r1", "r2", "r4"]
            assert await ended(client, "left") == 1

    run(test)


def test_two_schedulers_do_not_starve_each_other() -> None:
    """While instances admit one request after the other, requests of both schedulers are placed."""

    async def test() -> None:
        async with (
            admitting_two("a") as (stub,),
            scheduler([stub], policy=TWO_EACH) as one,
            scheduler([stub], policy=TWO_EACH) as two,
        ):
            decided = [await one.decide(one.request(request_id=name)) for name in ("x", "y")]

            async def served(client: Client, name: str) -> None:
                decided.append(await client.decide(client.request(request_id=name)))

            tasks = [
                asyncio.create_task(served(client, f"{which}{number}"))
                for number in range(24)
                for which, client in enumerate((one, two))
            ]
            await until(lambda: one.count(HELD) == two.count(HELD) == 24)
            while not {"0", "1"} <= {name[0] for name in stub.reserved_ids}:
                await until(lambda: len(decided) > 0)
                await one.release(decided.pop(0))
            assert min(one.count(HELD), two.count(HELD)) > 0
            stub.per_reservation_s = 0.0
            await asyncio.gather(*tasks)
            assert len(stub.reserved_ids) == 50

    run(test)


def test_other_models_need_not_wait() -> None:
    """A held request for one model does not delay requests for other models."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs:
            stubs[0].models, stubs[1].models = ("m",), ("n",)
            async with scheduler(stubs, policy=LONG_HOLD) as client:
                stubs[0].per_reservation_s = 10.0
                await client.decide()
                waiting = asyncio.create_task(client.decide())
                await held(client, 1)
                assert await client.choose(request=client.request(model="n")) == "b"
                stubs[0].per_reservation_s = 0.0
                await waiting

    run(test)


def test_requests_without_forecast_and_dry_runs_are_not_held() -> None:
    """Without forecasts no condition can become true; a dry run returns at once."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=LONG_HOLD) as client:
            stub.per_reservation_s = 10.0
            await client.decide()
            assert "held" not in (await client.decide(dry_run=True)).why
            stub.refuse = grpc.StatusCode.UNAVAILABLE
            assert (await client.decide()).basis == common_pb2.DECISION_BASIS_LAST_RESORT
            assert client.count("block_held_seconds_count") == 0

    run(test)


def test_a_new_instance_gets_held_requests() -> None:
    """Held requests are decided by the current list of instances."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy=LONG_HOLD) as client:
            for stub in stubs:
                stub.per_reservation_s = 10.0
            stubs[1].state = common_pb2.INSTANCE_STATE_DRAINING
            stubs[1].update_load()
            decision = await client.decide(request=client.request(request_id="first"))
            while decision.num_skipped == 0:  # until the scheduler has its state
                await client.release(decision)
                decision = await client.decide()
            waiting = asyncio.create_task(client.choose())
            await held(client, 1)
            stubs[1].state = common_pb2.INSTANCE_STATE_READY
            stubs[1].update_load()
            assert await waiting == "b"

    run(test)


@asynccontextmanager
async def provisioner(folder: Path) -> AsyncIterator[tuple[str, Pool]]:
    """Serve a provisioner that only receives reports; its address, and what it knows."""
    one = leader(folder, RecordingHook(set()))
    server = grpc.aio.server()
    provisioner_pb2_grpc.add_ProvisionerServicer_to_server(ProvisionerService(one._pool, one), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", one._pool
    finally:
        await server.stop(None)


def test_provisioners_get_reports_of_waiting_requests(tmp_path: Path) -> None:
    """By their targets for the time per token, without best effort; and that none waits any more."""

    async def test() -> None:
        async with (
            provisioner(tmp_path) as (address, pool),
            sidecars("a") as (stub,),
            scheduler([stub], policy=LONG_HOLD, provisioners=(address,), scheduler_id="one") as client,
        ):
            stub.per_reservation_s = 10.0
            await client.decide()
            slo = common_pb2.Slo(tpot_s=0.05)
            best_effort = common_pb2.REQUEST_CLASS_BEST_EFFORT
            requests = [client.request(slo=slo), client.request(slo=slo, request_class=best_effort), client.request()]
            waiting = [asyncio.create_task(client.decide(request)) for request in requests]
            await held(client, 3)
            await until(lambda: pool.waiting_targets() == {0.05: 1})
            stub.per_reservation_s = 0.0
            await asyncio.gather(*waiting)
            await until(lambda: pool.waiting_targets() == {})

    run(test)


def test_hold_conditions_may_read_indicators() -> None:
    """A condition over reported indicators needs no forecast."""

    async def test() -> None:
        async with (
            sidecars("a") as (stub,),
            scheduler([stub], policy='jsq: hold = "num_running < 5", hold_s = 1000') as client,
        ):
            stub.update_load(num_running=4)
            await client.decide()
            stub.update_load(num_running=5)
            waiting = asyncio.create_task(client.decide(client.request(request_id="late")))
            await until(lambda: client.count(HELD) == 1 or waiting.done())
            if waiting.done():  # it was decided before the report of the instance
                waiting = asyncio.create_task(client.decide())
                await held(client, 1)
            stub.update_load(num_running=4)
            decision = await waiting
            assert not stub.questions
            assert math.isnan(decision.forecast.e2e_s) or decision.forecast.e2e_s == 0.0

    run(test)


@pytest.mark.parametrize("policy", ["hold: hold_s = -1", 'hold: hold = "predicted_queue_s"', "hold: held = 1"])
def test_a_bad_policy_is_refused(policy: str) -> None:
    """The error names the parameter."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            assert "hold" in await refused(client.decide(policy=policy))

    run(test)
