"""Requests that wait at a scheduler until an instance admits them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.block.v1 import common_pb2, scheduler_pb2
from tests.services.scheduler_server.running import Client, refused, run, scheduler, until
from tests.services.stub_sidecars import StubSidecar, sidecars

PATIENT = "hold: hold_s = 1000"
TWO_EACH = 'hold: hold = "predicted_queue_s < 1.5 and predicted_preemptions < 1", hold_s = 1000'
HELD = "block_held_requests"


@asynccontextmanager
async def roomy(*names: str) -> AsyncIterator[list[StubSidecar]]:
    """Instances that admit two each, by that policy: every promise keeps others waiting for a second."""
    async with sidecars(*names) as stubs:
        for stub in stubs:
            stub.per_promise_s = 1.0
        yield list(stubs)


async def held(client: Client, number: int) -> None:
    """Wait until so many are held."""
    await until(lambda: client.count(HELD) == number)


async def ended(client: Client, end: str) -> float:
    """Count those whose being held ended like that."""
    return client.count("block_holds_total", end=end)


def test_a_request_waits_until_there_is_room_for_it() -> None:
    """Two go at once; the third when one of them has ended, and its decision says so."""

    async def test() -> None:
        async with roomy("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
            first, second = await client.decide(), await client.decide()
            assert "held" not in first.why + second.why
            assert client.count("block_held_seconds_count") == 0
            third = asyncio.create_task(client.decide())
            await held(client, 1)
            assert stub.ever == ["r1", "r2"]
            await client.release(first)
            decision = await third
            assert stub.ever == ["r1", "r2", "r3"]
            assert "; held " in decision.why
            assert "nobody admitted it" not in decision.why
            explained = await client.stub.Explain(scheduler_pb2.ExplainRequest(request_id="r3"))
            assert explained.decision.why == decision.why
            assert client.count(HELD) == 0
            assert client.count("block_held_seconds_count") == 1
            assert await ended(client, "admitted") == 1

    run(test)


def test_who_came_first_goes_first() -> None:
    """However many wait, each release lets the next one go."""

    async def test() -> None:
        async with roomy("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
            decided = [await client.decide(), await client.decide()]
            waiting = []
            for number in range(1, 7):
                waiting.append(asyncio.create_task(client.decide()))
                await held(client, number)
            for task in waiting:
                await client.release(decided.pop(0))
                decided.append(await task)
            assert stub.ever == [f"r{number}" for number in range(1, 9)]

    run(test)


def test_nobody_waits_for_longer_than_may_be() -> None:
    """When its time is up a request goes to whoever is best, admitted or not."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy="hold: hold_s = 0.3") as client:
            for stub in stubs:
                stub.per_promise_s = 10.0
            stubs[1].e2e_s = 9.0
            assert [await client.choose(), await client.choose()] == ["a", "b"]
            late = await client.decide()
            assert "not admitted by any instance" in late.why
            assert late.instance.instance_id == "a"
            assert await ended(client, "not_admitted") == 1

    run(test)


def test_a_caller_with_a_deadline_hears_in_time() -> None:
    """Its request is held for a part of the time that it has."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=PATIENT) as client:
            stub.per_promise_s = 10.0
            await client.decide()
            message = scheduler_pb2.ScheduleRequest(request=client.request())
            late = (await client.stub.Schedule(message, timeout=20)).decision
            assert "not admitted by any instance" in late.why

    run(test)


def test_when_there_are_too_many_the_first_goes() -> None:
    """The line is bounded; who comes is never refused."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=PATIENT, most_held=2) as client:
            stub.per_promise_s = 10.0
            await client.decide()
            waiting = []
            for number in (1, 2):
                waiting.append(asyncio.create_task(client.decide()))
                await held(client, number)
            waiting.append(asyncio.create_task(client.decide()))
            first = await waiting[0]
            assert "not admitted by any instance" in first.why
            assert client.count(HELD) == 2
            stub.per_promise_s = 0.0
            await asyncio.gather(*waiting)
            assert stub.ever == ["r1", "r2", "r3", "r4"]

    run(test)


def test_who_leaves_keeps_nobody_waiting() -> None:
    """A client that goes away is forgotten, nothing is promised to it, and the next one's turn comes."""

    async def test() -> None:
        async with roomy("a") as (stub,), scheduler([stub], policy=TWO_EACH) as client:
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
            assert stub.ever == ["r1", "r2", "r4"]
            assert await ended(client, "left") == 1

    run(test)


def test_two_schedulers_do_not_starve_each_other() -> None:
    """While there is room for one request after the other, those of both schedulers come to it."""

    async def test() -> None:
        async with (
            roomy("a") as (stub,),
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
            while not {"0", "1"} <= {name[0] for name in stub.ever}:
                await until(lambda: len(decided) > 0)
                await one.release(decided.pop(0))
            assert min(one.count(HELD), two.count(HELD)) > 0
            stub.per_promise_s = 0.0
            await asyncio.gather(*tasks)
            assert len(stub.ever) == 50

    run(test)


def test_other_models_need_not_wait() -> None:
    """Who waits for one model's instances holds nobody up who goes elsewhere."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs:
            stubs[0].models, stubs[1].models = ("m",), ("n",)
            async with scheduler(stubs, policy=PATIENT) as client:
                stubs[0].per_promise_s = 10.0
                await client.decide()
                waiting = asyncio.create_task(client.decide())
                await held(client, 1)
                assert await client.choose(request=client.request(model="n")) == "b"
                stubs[0].per_promise_s = 0.0
                await waiting

    run(test)


def test_what_nobody_can_foretell_is_not_held() -> None:
    """Without forecasts there is nothing to wait for; a question whose answer is not acted on does not wait either."""

    async def test() -> None:
        async with sidecars("a") as (stub,), scheduler([stub], policy=PATIENT) as client:
            stub.per_promise_s = 10.0
            await client.decide()
            assert "held" not in (await client.decide(dry_run=True)).why
            stub.refuse = grpc.StatusCode.UNAVAILABLE
            assert (await client.decide()).basis == common_pb2.DECISION_BASIS_LAST_RESORT
            assert client.count("block_held_seconds_count") == 0

    run(test)


def test_an_instance_that_comes_takes_who_waits() -> None:
    """Who waits sees the instances as they are now, not as they were."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, policy=PATIENT) as client:
            for stub in stubs:
                stub.per_promise_s = 10.0
            stubs[1].state = common_pb2.INSTANCE_STATE_DRAINING
            stubs[1].tell()
            decision = await client.decide(request=client.request(request_id="first"))
            while decision.num_skipped == 0:  # until the scheduler has heard of it
                await client.release(decision)
                decision = await client.decide()
            waiting = asyncio.create_task(client.choose())
            await held(client, 1)
            stubs[1].state = common_pb2.INSTANCE_STATE_READY
            stubs[1].tell()
            assert await waiting == "b"

    run(test)


def test_indicators_can_be_waited_for_too() -> None:
    """A condition over what instances tell needs no forecast."""

    async def test() -> None:
        async with (
            sidecars("a") as (stub,),
            scheduler([stub], policy='jsq: hold = "num_running < 5", hold_s = 1000') as client,
        ):
            stub.tell(num_running=4)
            await client.decide()
            stub.tell(num_running=5)
            waiting = asyncio.create_task(client.decide(client.request(request_id="late")))
            await until(lambda: client.count(HELD) == 1 or waiting.done())
            if waiting.done():  # it came before what the instance told
                waiting = asyncio.create_task(client.decide())
                await held(client, 1)
            stub.tell(num_running=4)
            decision = await waiting
            assert not stub.questions
            assert math.isnan(decision.forecast.e2e_s) or decision.forecast.e2e_s == 0.0

    run(test)


@pytest.mark.parametrize("policy", ["hold: hold_s = -1", 'hold: hold = "predicted_queue_s"', "hold: held = 1"])
def test_a_bad_policy_is_refused(policy: str) -> None:
    """With what is wrong about it."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            assert "hold" in await refused(client.decide(policy=policy))

    run(test)
