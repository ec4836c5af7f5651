"""Sidecars that are late, dead, or send invalid replies cost a deadline, never the request."""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, predictor_pb2
from tests.services.scheduler_server.running import (
    AT_ONCE,
    FOR_EVER,
    FORECAST,
    LAST_RESORT,
    LIMIT_S,
    refused,
    run,
    scheduler,
    statuses,
    until,
)
from tests.services.stub_sidecars import StubSidecar, sidecars

DEADLINE_S = 3.0  # for sidecars that hang; the others reply in time on a busy machine
DEADLINE = {"sidecar_deadline_s": DEADLINE_S}


def test_the_circuit_of_a_late_sidecar_opens_and_closes() -> None:
    """It costs two deadlines, then nothing; after its recovery it is used again."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, **DEADLINE, first_pause_s=4.0) as client:
            await client.decide()
            stubs[0].hung = hung = asyncio.Event()
            for _ in range(2):
                decision = await client.decide(explain=True)
                assert decision.instance.instance_id == "b"
                assert statuses(decision)["a"] == "LATE"
                assert (decision.num_skipped, decision.decision_s >= DEADLINE_S) == (1, True)
                assert f"a: no reply within {1000 * DEADLINE_S:.0f} ms" in decision.why
            decision = await client.decide(explain=True)
            assert statuses(decision) == {"a": "DOWN", "b": "FORECAST"}
            assert client.count("block_sidecar_circuits_open") == 1
            assert client.count("block_sidecar_failures_total", instance="a", kind="late") == 2
            stubs[0].hung = None
            hung.set()
            while statuses(await client.decide(explain=True))["a"] != "FORECAST":
                pass
            assert client.count("block_sidecar_circuits_open") == 0

    run(test)


@pytest.mark.parametrize("streams", [True, False])
def test_a_killed_sidecar_is_skipped_and_comes_back(streams: bool) -> None:
    """No request fails; after its restart it gets requests again, without its earlier reservations."""

    async def test() -> None:
        async with sidecars("a", "b", streams=streams) as stubs, scheduler(stubs, **AT_ONCE) as client:
            stubs[1].e2e_s = 9.0
            assert [await client.choose() for _ in range(3)] == ["a", "a", "a"]
            await stubs[0].crash()
            decisions = [await client.decide(explain=True) for _ in range(4)]
            assert {decision.instance.instance_id for decision in decisions} == {"b"}
            assert all("without a: " in decision.why for decision in decisions)
            stubs[0].streams = not streams  # as another version would
            await stubs[0].start()
            while await client.choose() != "a":
                pass
            assert await client.choose() == "a"

    run(test)


def nothing(response: predictor_pb2.PredictResponse) -> Any:  # noqa: ARG001
    """Return an empty reply."""
    return b""


def changed(**fields: Any) -> Callable[[predictor_pb2.PredictResponse], None]:
    """Set fields of the forecast in a reply."""

    def twist(response: predictor_pb2.PredictResponse) -> None:
        for name, value in fields.items():
            setattr(response.predictions[0].forecast, name, value)

    return twist


def without(path: str) -> Callable[[predictor_pb2.PredictResponse], None]:
    """Remove a field from a reply."""

    def twist(response: predictor_pb2.PredictResponse) -> None:
        (response.predictions[0] if path == "forecast" else response).ClearField(path)

    return twist


def with_indicator(name: str, value: float) -> Callable[[predictor_pb2.PredictResponse], None]:
    """Set an indicator in a reply."""
    return lambda response: setattr(response.indicators, name, value)


@pytest.mark.parametrize(
    ("twist", "named"),
    [
        (lambda _: b"\xff\xff\xff", "its reply is no PredictResponse"),
        (nothing, "instance_id"),
        (changed(e2e_s=math.nan), "forecast.e2e_s"),
        (changed(ttft_s=-1.0, queue_s=-2.0), "forecast.queue_s"),
        (changed(e2e_s=0.0, ttft_s=0.0, queue_s=0.0), "forecast.e2e_s"),
        (lambda response: setattr(response, "instance_id", "b"), "instance_id: 'b' answers there"),
        (lambda response: setattr(response.predictions[0], "request_id", "z"), "'z' is not the request asked about"),
        (without("predictions"), "predictions: there are 0"),
        (without("forecast"), "forecast: is missing"),
        (with_indicator("pace", math.nan), "indicators.pace"),
        (with_indicator("step_s", -1.0), "indicators.step_s"),
    ],
)
def test_a_sidecar_with_invalid_replies_is_skipped(twist: Callable[[Any], Any], named: str) -> None:
    """The invalid field is named in the decision, and the circuit opens."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, **FOR_EVER) as client:
            stubs[0].twist = twist
            stubs[1].e2e_s = 50.0
            for _ in range(2):
                decision = await client.decide(explain=True)
                assert decision.instance.instance_id == "b"
                assert statuses(decision) == {"a": "INVALID", "b": "FORECAST"}
                assert named in decision.why
            num_asked = len(stubs[0].questions)
            assert await client.choose() == "b"
            assert len(stubs[0].questions) == num_asked

    run(test)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, "DOWN"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "DOWN"),
        (grpc.StatusCode.INTERNAL, "DOWN"),
        (grpc.StatusCode.FAILED_PRECONDITION, "INVALID"),
    ],
)
def test_a_sidecar_that_returns_errors_is_skipped(code: grpc.StatusCode, status: str) -> None:
    """An error status is a failure like a missing reply."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:
            stubs[0].refuse = code
            decision = await client.decide(explain=True)
            assert decision.instance.instance_id == "b"
            assert statuses(decision)["a"] == status
            assert code.name in decision.why

    run(test)


def test_a_request_that_an_instance_could_never_serve_goes_to_another() -> None:
    """If all instances refuse it the request is invalid; no circuit opens."""

    def refuse(response: predictor_pb2.PredictResponse) -> None:
        response.predictions[0].ClearField("forecast")
        response.predictions[0].refusal.CopyFrom(
            predictor_pb2.Refusal(field="prompt_tokens", reason="10 are more than max_model_len")
        )

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs) as client:
            stubs[0].twist = refuse
            assert [await client.choose() for _ in range(3)] == ["b", "b", "b"]
            stubs[1].twist = refuse
            for _ in range(3):
                assert await refused(client.decide()) == "request.prompt_tokens: 10 are more than max_model_len"
            stubs[0].twist = stubs[1].twist = None
            stubs[0].refuse = stubs[1].refuse = grpc.StatusCode.INVALID_ARGUMENT
            for _ in range(3):
                await refused(client.decide())
            stubs[0].refuse = stubs[1].refuse = None
            assert (await client.decide()).num_skipped == 0

    run(test)


def test_with_all_sidecars_dead_requests_still_go_somewhere() -> None:
    """The last resort is an instance that may work; requests spread over all, the least busy first."""

    async def test() -> None:
        async with sidecars("a", "b", "c") as stubs, scheduler(stubs) as client:
            stubs[0].held["x"] = stubs[0].held["y"] = predictor_pb2.ReserveRequest()
            await client.decide(dry_run=True)
            for stub in stubs:
                await stub.crash()
            decisions = [await client.decide(explain=True) for _ in range(16)]
            assert {decision.basis for decision in decisions} == {LAST_RESORT}
            assert not any(decision.HasField("reserved_for_s") for decision in decisions)
            assert Counter(decision.instance.instance_id for decision in decisions) == {"a": 4, "b": 6, "c": 6}
            assert decisions[0].num_skipped == 3
            assert client.count("block_decisions_total", policy="block", basis="last_resort") == 16

    run(test)


def test_late_instances_are_compared_by_their_last_indicators() -> None:
    """Without any forecast the instance that was last reported the least busy gets the request."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, **DEADLINE) as client:
            stubs[0].held["x"] = predictor_pb2.ReserveRequest()
            await client.decide(dry_run=True)
            stubs[0].hung = stubs[1].hung = asyncio.Event()
            decision = await client.decide(explain=True)
            assert (decision.instance.instance_id, decision.basis) == ("b", LAST_RESORT)
            assert statuses(decision) == {"a": "LAST_INDICATORS", "b": "LAST_INDICATORS"}
            assert decision.candidates[0].indicators.num_reserved == 1
            assert decision.candidates[0].indicators.age_s > 0.01
            stubs[0].hung.set()

    run(test)


def test_a_sidecar_that_hangs_while_reserving_costs_a_deadline() -> None:
    """The request goes to the next best instance; a reservation that may have been made is released."""

    async def test() -> None:
        async with sidecars("a", "b") as stubs, scheduler(stubs, **DEADLINE) as client:
            stubs[0].hung_reserving = asyncio.Event()
            decision = await client.decide(explain=True)
            assert decision.instance.instance_id == "b"
            assert f"a: when reserving: no reply within {1000 * DEADLINE_S:.0f} ms" in decision.why
            assert statuses(decision) == {"a": "LATE", "b": "FORECAST"}
            stubs[0].hung_reserving.set()

    run(test)


# Streams that end.


def test_a_restart_of_a_sidecar_is_no_failure() -> None:
    """Requests without a reply are sent again, to the new process."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            await client.decide(dry_run=True)
            old, new = stubs[0], StubSidecar(name="a", port=stubs[0].port)
            old.hung = asyncio.Event()
            calls = [asyncio.ensure_future(client.decide(dry_run=True)) for _ in range(3)]
            await until(lambda: len(old.questions) == 2)
            stopping = asyncio.ensure_future(
                old.server.stop(LIMIT_S)
            )  # its port is closed, but the stream is still open
            await until(lambda: is_free(new.port))
            await new.start()
            await old.stop()
            assert [(await call).basis for call in calls] == [FORECAST] * 3
            assert len(new.questions) == 3
            assert client.count("block_sidecar_failures_total", instance="a", kind="down") == 0
            await stopping
            await new.stop()

    run(test)


def test_the_end_of_an_idle_stream_is_no_failure() -> None:
    """The next request opens another stream."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            for num_streams in range(1, 4):
                assert (await client.decide()).basis == FORECAST
                assert stubs[0].num_streams == num_streams
                stubs[0].end_streams()
                await until(lambda: not stubs[0].open_streams)
            assert not client.count("block_sidecar_failures_total", instance="a", kind="down")

    run(test)


def test_a_refused_request_does_not_affect_others_on_its_stream() -> None:
    """The error that ends a stream is the reply to the oldest request; the others are sent again."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            await client.decide(dry_run=True)
            stubs[0].refuse_prompts_of = 13
            lengths = (10, 13, 11, 13, 12)
            decisions = await asyncio.gather(
                *(client.decide(client.request(prompt_tokens=length), dry_run=True) for length in lengths),
                return_exceptions=True,
            )
            results = [one.basis if isinstance(one, common_pb2.Decision) else one.code() for one in decisions]
            bad = grpc.StatusCode.INVALID_ARGUMENT
            assert results == [FORECAST, bad, FORECAST, bad, FORECAST]

    run(test)


def is_free(port: int) -> bool:
    """Return whether no process listens on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
