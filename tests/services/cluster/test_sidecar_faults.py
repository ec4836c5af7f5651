"""Requests while sidecars of a running cluster hang, send invalid replies, or send wrong forecasts."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import statistics
from functools import partial

import pytest

from protos.block.v1 import predictor_pb2
from tests.services.cluster.living import ENGINES, MODEL, SCHEDULERS, SIDECARS, Living, is_none, is_some
from tests.services.cluster.loading import Load, loaded
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

SOME = 20  # requests
AT_ONCE_S = 0.001
FAILURES = "block_sidecar_failures_total"
ERROR = "block_scheduler_forecast_error_ratio"
LEFT_ALONE = "block_sidecar_circuits_open"


def instances_since(load: Load, num_sent: int) -> set[str]:
    """The instances of the requests after the first ones."""
    return {one.instance for one in load.results if int(one.plan.request_id) > num_sent}


async def explained(live: Living) -> dict[str, float]:
    """Send a request, and return the forecast of each instance."""
    answer = await live.client.post(
        f"{live.gateway}/v1/completions",
        json={"model": MODEL, "prompt": "tell me why", "max_tokens": 9, "ignore_eos": True},
        headers={"x-block-explain": "true"},
    )
    assert answer.status_code == 200, answer.text
    candidates = json.loads(answer.headers["x-block-explanation"])["candidates"]
    return {one["instance"]: one["e2e_ms"] / 1000 for one in candidates}


async def error_of(live: Living, instance: str) -> float:
    """The mean forecast error of an instance, as schedulers report it."""
    total, count = [
        sum([await live.metric(one, f"{ERROR}_{what}", instance=instance) for one in SCHEDULERS])
        for what in ("sum", "count")
    ]
    return total / count


def test_a_sidecar_is_stopped(live: Living) -> None:
    """Its replies are late, so other instances are chosen; its circuit opens, and closes again when it continues."""
    sidecar, engine = SIDECARS[2], ENGINES[2]

    async def test() -> None:
        async with loaded(live.gateway) as load:
            await until(lambda: load.served_since(0, engine) > 0)
            with live.stopped(sidecar):
                for scheduler in SCHEDULERS:
                    await live.until_metric(scheduler, LEFT_ALONE, is_some)
                    assert await live.metric(scheduler, FAILURES, instance=engine, kind="late") > 0
                num_sent, start = load.num_sent, len(load.results)
                await until(lambda: load.served_since(start) >= 2 * SOME)
                assert engine not in instances_since(load, num_sent)
            for scheduler in SCHEDULERS:
                await live.until_metric(scheduler, LEFT_ALONE, is_none)
            start = len(load.results)
            await until(lambda: load.served_since(start, engine) > 0)
        assert not load.failures()

    live.run(test(), may_expire=True)  # reservations from before it stopped cannot be released


def nonsense(_: predictor_pb2.PredictResponse) -> bytes:
    """Reply with an empty message."""
    return b"\xff\xfe<html>garbage</html>"


def impossible(response: predictor_pb2.PredictResponse) -> predictor_pb2.PredictResponse:
    """Reply with impossible times."""
    for prediction in response.predictions:
        prediction.forecast.e2e_s = prediction.forecast.ttft_s = float("nan")
    return response


def of_another(response: predictor_pb2.PredictResponse) -> predictor_pb2.PredictResponse:
    """Reply under another instance's name."""
    response.instance_id = "another-instance"
    return response


async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reply with bytes that are no gRPC."""
    writer.write(b"220 mail ESMTP\r\n" * 100)
    await reader.read(1)
    writer.close()


def test_sidecars_answer_garbage(live: Living) -> None:
    """Instances with invalid replies get no requests, and no request fails; then they are removed from the list."""

    async def test() -> None:
        chatting = await asyncio.start_server(chatter, "127.0.0.1", 0)
        async with sidecars("nonsense", "impossible", "another", e2e_s=0.001) as optimists, chatting:
            for optimist, twist in zip(optimists, (nonsense, impossible, of_another), strict=True):
                optimist.twist = twist
            ports = {optimist.name: optimist.port for optimist in optimists} | {
                "no-grpc": chatting.sockets[0].getsockname()[1]
            }
            with live.also_listed(ports):
                async with loaded(live.gateway) as load:
                    for scheduler, name in itertools.product(SCHEDULERS, ports):
                        await live.until_metric(scheduler, "block_sidecar_failures_total", is_some, instance=name)
                    start = len(load.results)
                    await until(lambda: load.served_since(start) >= SOME)
            assert not load.failures()
            assert {one.instance for one in load.results} <= set(ENGINES)
            for scheduler in SCHEDULERS:
                await live.until_metric(scheduler, "block_instances", partial(operator.eq, len(ENGINES)))

    live.run(test())


def test_a_sidecar_lies_plausibly(live: Living) -> None:
    """It always forecasts that its engine is free: it gets every request, and the engine still serves them all.

    Nobody distrusts it, as what it says could be; but an explained reply tells on whose word it came, and schedulers count
    how far off that was.
    """

    async def test() -> None:
        async with sidecars("optimist", e2e_s=2 * AT_ONCE_S, ttft_s=AT_ONCE_S, per_reservation_s=0.0) as (optimist,):
            with live.also_listed({optimist.name: optimist.port}):
                for scheduler in SCHEDULERS:
                    await live.until_metric(scheduler, "block_instances", partial(operator.eq, len(ENGINES) + 1))
                async with loaded(live.gateway, clients=12) as load:  # more than max_num_seqs of the engine
                    await until(lambda: load.served_since(0, "optimist") >= 2 * SOME)
                    foretold = await explained(live)
                await until(lambda: not optimist.held)  # all its reservations have been released
                assert await error_of(live, "optimist") > 0.9
            assert not load.failures()
            assert {one.instance for one in load.results} == {"optimist"}
            actual_s = statistics.median(one.e2e_s for one in load.results)
            assert foretold["optimist"] < min(foretold[engine] for engine in ENGINES)
            assert foretold["optimist"] < actual_s / 10
            for scheduler in SCHEDULERS:
                await live.until_metric(scheduler, "block_instances", partial(operator.eq, len(ENGINES)))
            async with loaded(live.gateway) as load:
                await until(lambda: load.served_since(0) >= SOME)
            assert {one.instance for one in load.results} <= set(ENGINES)

    live.run(test())
