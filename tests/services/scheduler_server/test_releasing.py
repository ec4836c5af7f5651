"""The end of requests: reservations are released, and outcomes are used."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from protos.block.v1 import common_pb2, scheduler_pb2
from tests.services.scheduler_server.running import (
    FAILED,
    FOR_EVER,
    STOP,
    ChangingSource,
    refused,
    run,
    scheduler,
    statuses,
    until,
)
from tests.services.stub_sidecars import sidecars


def test_any_scheduler_releases_a_reservation_of_another() -> None:
    """Schedulers keep no state of it; releasing twice, or an unknown reservation, is no error."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs:
            async with scheduler(stubs) as one:
                decision = await one.decide()
            async with scheduler(stubs) as two:
                assert await two.release(decision, STOP)
                assert not stubs[0].held
                assert [outcome.finish_reason for outcome in stubs[0].outcomes] == [STOP]
                assert not await two.release(decision)
                decision.instance.instance_id = "gone"
                assert not await two.release(decision)
                assert two.count("block_releases_total", released="unknown_instance") == 1
                decision.instance.instance_id = "b"
                await stubs[1].crash()
                assert not await two.release(decision)

    run(test)


def test_the_outcome_of_a_request_whose_instance_was_removed_is_recorded(tmp_path: Path) -> None:
    """The list drops instances whose last requests still run; only the reservation can no longer be released."""

    async def test() -> None:
        path, source = tmp_path / "decisions.jsonl", ChangingSource()
        async with sidecars("a") as stubs:
            source.instances = [stubs[0].instance]
            async with scheduler(source, record=str(path)) as client:
                decision = await client.decide()
                source.instances = []
                await until(lambda: client.count("block_instances") == 0)
                assert not await client.release(decision, STOP)
                assert client.count("block_releases_total", released="unknown_instance") == 1
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["decision", "outcome"]
        assert lines[1]["outcome"]["finish_reason"] == "FINISH_REASON_STOP"

    run(test)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"instance_id": "a"}, "request_id: is missing"),
        ({"request_id": "r"}, "instance_id: is missing"),
        ({"request_id": "r", "instance_id": "a", "outcome": common_pb2.Outcome(e2e_s=math.nan)}, "outcome.e2e_s"),
    ],
)
def test_bad_releases_are_named(fields: dict[str, Any], named: str) -> None:
    """The error names the field."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            assert named in await refused(client.stub.Release(common_pb2.ReleaseRequest(**fields)))

    run(test)


def test_an_engine_that_fails_requests_is_avoided() -> None:
    """Regardless of its forecasts; after a success it is used again."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, **FOR_EVER) as client:
            stubs[1].e2e_s = 9.0
            for _ in range(2):
                decision = await client.decide()
                assert decision.instance.instance_id == "a"
                await client.release(decision, FAILED)
            decision = await client.decide(explain=True)
            assert decision.instance.instance_id == "b"
            assert "without a: its engine failed recently" in decision.why
            assert (decision.num_skipped, statuses(decision)["a"]) == (1, "FORECAST")
            assert await client.choose(exclude_instance_ids=["b"]) == "a"
            decision.instance.instance_id = "a"
            await client.release(decision, STOP)
            assert await client.choose() == "a"

    run(test)


def test_an_engine_that_failed_is_tried_again_by_one_request() -> None:
    """After a pause one request is sent to it; its outcome closes the circuit or opens it again."""

    async def test() -> None:
        pauses = {"first_pause_s": 0.1, "longest_pause_s": 1000.0}
        async with sidecars("a", "b") as stubs, scheduler(stubs, **pauses) as client:
            stubs[1].e2e_s = 9.0
            for _ in range(2):
                await client.release(await client.decide(client.request(), exclude_instance_ids=["b"]), FAILED)
            while (trial := await client.decide()).instance.instance_id != "a":
                await client.release(trial)
            await client.release(trial, STOP)
            assert [await client.choose() for _ in range(3)] == ["a", "a", "a"]

    run(test)


def test_a_cancelled_call_leaves_no_reservation() -> None:
    """A reservation whose reply is on its way is released."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            stubs[0].hung_after_reserving = asyncio.Event()
            call = client.stub.Schedule(scheduler_pb2.ScheduleRequest(request=client.request()))
            await until(lambda: bool(stubs[0].held))
            call.cancel()
            await until(lambda: not stubs[0].held)
            stubs[0].hung_after_reserving.set()
            assert (await client.decide(client.request(request_id="next"))).instance.instance_id == "a"
            assert set(stubs[0].held) == {"next"}

    run(test)


def test_forecast_errors_are_counted() -> None:
    """By instance, for completed responses."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            for finish_reason in (STOP, FAILED):
                decision = await client.decide()
                outcome = common_pb2.Outcome(
                    request_id=decision.request_id, ttft_s=0.2, e2e_s=8.0, output_tokens=9, finish_reason=finish_reason
                )
                await client.stub.Release(
                    common_pb2.ReleaseRequest(request_id=decision.request_id, instance_id="a", outcome=outcome)
                )
            name = "block_scheduler_forecast_error_ratio"
            assert client.count(f"{name}_count", instance="a") == 1
            assert client.count(f"{name}_sum", instance="a") == pytest.approx(0.75)  # 2 s were predicted

    run(test)
