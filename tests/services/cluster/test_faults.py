"""Requests while parts of a running cluster are killed, hang or misbehave."""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from services.cluster import Child
from tests.services.cluster.living import ENGINES, MODEL, NUM_SEATS, SCHEDULERS, SIDECARS, Living, is_none, is_some
from tests.services.cluster.loading import loaded
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

SOME = 20  # requests
LEAVERS = 10
RETRIES = 4
PREEMPTIONS = "vllm:num_preemptions_total"
LONG = {"model": MODEL, "prompt": "tell me a story", "max_tokens": 400, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def flowing(live: Living) -> AsyncIterator[tuple[str, AsyncIterator[str]]]:
    """A stream that started on an engine that is slow now; its instance, and the rest of the stream."""
    async with live.client.stream("POST", f"{live.gateway}/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        events = aiter(response.aiter_lines())
        assert json.loads((await anext(events)).removeprefix("data: "))["choices"]
        engine = response.headers["x-block-instance"]
        await live.order(engine, slow=100.0)
        yield engine, events


def assert_is_whole(rest: list[str]) -> None:
    """Check what follows the first event of a stream: a mark where it continued, all other tokens, and its end."""
    *events, last = rest
    assert last == "data: [DONE]", last
    assert [line for line in events if line.startswith(":")] == [": x-block-migrations: 1"]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in events if line.startswith("data: ")]
    assert len(choices) == LONG["max_tokens"] - 1
    assert all(choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "length"


async def rest_of(events: AsyncIterator[str]) -> list[str]:
    """Read the remaining events."""
    return [line async for line in events if line]


def test_an_engine_is_killed(live: Living) -> None:
    """Its streams continue on other engines, so that no request fails, and it serves again after its restart."""

    async def test() -> None:
        async with flowing(live) as (victim, events), loaded(live.gateway) as load:
            await until(lambda: load.served_since(0) >= SOME)
            back = await live.kill(victim)
            assert_is_whole(await rest_of(events))
            await until(back)
            start = len(load.results)
            await until(lambda: load.served_since(start, victim) > 0)
        assert not load.failures()
        assert await live.metric("gateway-block", "block_gateway_migrations_total", result="continued") > 0

    live.run(test())


def test_a_sidecar_is_killed(live: Living) -> None:
    """No request fails; the engine gets new requests once it has forecasts again."""

    async def test() -> None:
        sidecar, engine = SIDECARS[1], ENGINES[1]
        async with loaded(live.gateway) as load:
            await until(lambda: load.served_since(0, engine) > 0)
            back = await live.kill(sidecar)
            start = len(load.results)
            await until(lambda: load.served_since(start) >= SOME)
            await until(back)
            start = len(load.results)
            await until(lambda: load.served_since(start, engine) > 0)
        assert not load.failures()
        assert await live.metric(sidecar, "block_forecasts_total", result="made") > 0

    live.run(test())


def test_one_of_two_schedulers_is_killed_and_then_the_other(live: Living) -> None:
    """No request fails: the other scheduler decides, and the first one again when the other is killed."""

    async def test() -> None:
        decisions = "block_decisions_total"
        async with loaded(live.gateway) as load:
            for victim, other in (SCHEDULERS, SCHEDULERS[::-1]):
                await live.until_metric(victim, decisions, is_some)
                back = await live.kill(victim)
                before = await live.metric(other, decisions)
                await live.until_metric(other, decisions, partial(operator.lt, before + SOME))
                await until(back)
                await live.until_metric(victim, decisions, is_some)
        assert not load.failures()

    live.run(test(), may_expire=True)  # a scheduler may be killed between a reservation and its decision


def test_the_tagger_is_killed(live: Living) -> None:
    """Requests are placed by default lengths; after its restart it is used again, and receives outcomes."""

    async def test() -> None:
        async with loaded(live.gateway) as load:
            await live.until_metric("tagger", "block_tagger_tags_total", is_some)
            back = await live.kill("tagger")
            start = len(load.results)
            await until(lambda: load.served_since(start) >= SOME)
            await until(back)
            await live.until_metric("tagger", "block_tagger_tags_total", is_some)
            await live.until_metric("tagger", "block_tagger_outcomes_total", is_some)
        assert not load.failures()

    live.run(test())


def test_an_engine_hangs(live: Living) -> None:
    """Its streams continue elsewhere after a while, its sidecar reports it down, and it serves when it recovers.

    It accepts connections, and its /health does not respond.
    """

    async def test() -> None:
        async with flowing(live) as (victim, events), loaded(live.gateway) as load:
            sidecar = victim.replace("engine", "predictor")
            await until(lambda: load.served_since(0) >= SOME)
            await live.order(victim, hang=True)
            await live.until_metric(sidecar, "block_engine_up", is_none)
            start = len(load.results)
            assert_is_whole(await rest_of(events))
            await until(lambda: load.served_since(start) >= SOME)
            await live.order(victim)
            start = len(load.results)
            await until(lambda: load.served_since(start, victim) > 0)
        assert not load.failures()

    live.run(test(), may_expire=True)  # reservations from before the hang was noticed


async def answered(live: Living, gateway: Child, **fields: Any) -> httpx.Response:
    """Send a short request to a gateway."""
    body = {"model": MODEL, "prompt": "tell me", "max_tokens": 9, "ignore_eos": True, "stream": True, **fields}
    return await live.client.post(f"http://127.0.0.1:{gateway.port}/v1/completions", json=body)


def test_an_engine_hangs_before_the_first_byte(live: Living) -> None:
    """Its requests are sent to other engines when nothing has come in time, as long as the retry budget allows.

    All are placed there by the forecasts of its sidecar, that it is free at once.
    """
    hasty = ("--first-byte-s", "8", "--max-concurrency", str(RETRIES), "--retry-ratio", "0", "--schedule-s", "20")

    async def test() -> None:
        free_at_once = sidecars("liar", ttft_s=0.001, e2e_s=0.002, per_reservation_s=0)
        async with free_at_once as (liar,), live.another_gateway(*hasty) as gateway:
            with live.also_listed({liar.name: liar.port}, without=ENGINES[:2]):
                for scheduler in SCHEDULERS:
                    await live.until_metric(scheduler, "block_instances", partial(operator.eq, len(ENGINES) - 1))
                await live.order(ENGINES[0], hang=True)
                answers = await asyncio.gather(*(answered(live, gateway) for _ in range(RETRIES)))
                assert {answer.status_code for answer in answers} == {200}
                assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
                assert {answer.headers["x-block-instance"] for answer in answers} <= set(ENGINES[2:])
                late = await answered(live, gateway)
                while late.status_code == 200:  # meanwhile the engine that hangs is ejected, and tried now and then
                    late = await answered(live, gateway)
                assert late.status_code == 504
                assert late.json()["error"]["message"] == "the engine did not answer in time"
                metrics = (await live.client.get(f"http://127.0.0.1:{gateway.port}/metrics")).text
                assert f'block_gateway_retries_total{{why="TimeoutError"}} {RETRIES:.1f}' in metrics
                await live.order(ENGINES[0])
            await until(lambda: not liar.held)
        for scheduler in SCHEDULERS:
            await live.until_metric(scheduler, "block_instances", partial(operator.eq, len(ENGINES)))

    live.run(test())


def test_clients_leave(live: Living) -> None:
    """A client that disconnects during a response leaves nothing behind, and affects no other request."""

    async def test() -> None:
        async with loaded(live.gateway) as load:
            for _ in range(LEAVERS):
                async with live.client.stream("POST", f"{live.gateway}/v1/completions", json=LONG) as response:
                    await anext(aiter(response.aiter_raw()))
            await until(lambda: load.served_since(0) >= SOME)
        assert not load.failures()

    live.run(test())


def test_all_caches_are_full(live: Living) -> None:
    """Requests wait, or are preempted, but all complete, long and short."""

    async def test() -> None:
        before = sum([await live.metric(engine, PREEMPTIONS) for engine in ENGINES])

        async def are_full() -> bool:
            waiting = [await live.metric(engine, "vllm:num_requests_waiting") for engine in ENGINES]
            running = [await live.metric(engine, "vllm:num_requests_running") for engine in ENGINES]
            return all(waiting) and max(running) < NUM_SEATS  # so that they do not wait for max_num_seqs

        async def made_room() -> bool:
            return sum([await live.metric(engine, PREEMPTIONS) for engine in ENGINES]) > before

        long = loaded(live.gateway, clients=12, prompt_tokens=80, output_tokens=220)
        async with long as load, loaded(live.gateway, clients=2) as shorts:
            await until(are_full, within_s=2 * PATIENCE_S)
            await until(made_room, within_s=2 * PATIENCE_S)
            start = len(shorts.results)
            await until(lambda: shorts.served_since(start) > 0)
            shorts.stopping = load.stopping = True
        assert not load.failures() + shorts.failures()

    live.run(test())
