"""Failures around the gateway: engines and schedulers that die, hang or refuse, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from protos.block.v1 import common_pb2
from tests.services.gateway.stubs import (
    COMPLETION,
    DONE,
    LOCAL,
    STREAM,
    Answer,
    Call,
    Engine,
    completes,
    event,
    hangs,
    scene,
    streams,
    unreachable,
)
from tests.services.waiting import PATIENCE_S, run

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
FAILED = common_pb2.FINISH_REASON_FAILED
LENGTH = common_pb2.FINISH_REASON_LENGTH


async def drops(call: Call) -> None:
    """Accept the request, and die."""
    call.die()


async def dies_after_head(call: Call) -> None:
    """Send the head of a stream, and die."""
    call.stream()
    await call.writer.drain()
    call.die()


async def dies_in_first_event(call: Call) -> None:
    """Die after half an event."""
    call.stream()
    await call.chunk(STREAM[0][:20])
    call.die()


async def dies_in_one_piece(call: Call) -> None:
    """Die after half of a reply in one piece."""
    call.head(200, "application/json", "content-length: 1000")
    call.writer.write(b'{"id":')
    await call.writer.drain()
    call.die()


async def sends_garbage(call: Call) -> None:
    """Reply with bytes that are not HTTP."""
    call.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await call.left()


def answers(status: int) -> Answer:
    """Reply with an error."""

    async def answer(call: Call) -> None:
        call.whole({"error": {"message": "no", "type": "x", "param": None, "code": status}}, status)

    return answer


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Check that an error has OpenAI's shape, and return it."""
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# Before the first byte.


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "answer",
    [drops, dies_after_head, dies_in_first_event, dies_in_one_piece, sends_garbage, answers(503), answers(429)],
)
def test_the_next_engine_is_tried(answer: Answer, stream: bool) -> None:
    """An engine that fails before its first event causes another decision without it, and its reservation is released."""

    async def test() -> None:
        async with scene(answer, streams if stream else completes) as here:
            response = await here.post(stream=stream)
            assert response.status_code == 200
            assert response.content == (b"".join(STREAM) if stream else json.dumps(COMPLETION).encode())
            assert response.headers["x-block-instance"] == "e1"
            first, second = here.scheduler.asked
            assert (list(first.exclude_instance_ids), list(second.exclude_instance_ids)) == ([], ["e0"])
            assert first.request.request_id == second.request.request_id
            released = [await here.scheduler.released.get() for _ in range(2)]
            assert {one.instance_id: one.outcome.finish_reason for one in released}["e0"] == FAILED
            assert {one.instance_id for one in released} == {"e0", "e1"}

    run(test)


def test_an_engine_that_cannot_be_reached() -> None:
    """The request goes to the next engine, and no outcome is reported for a request that was not sent."""

    async def test() -> None:
        async with scene(streams, urls=[unreachable()]) as here:
            assert (await here.post(stream=True)).content == b"".join(STREAM)
            released = {one.instance_id: one for one in [await here.scheduler.released.get() for _ in range(2)]}
            assert not released["e0"].HasField("outcome")
            assert released["e1"].outcome.finish_reason == LENGTH

    run(test)


def test_a_dead_engine_is_avoided() -> None:
    """After two failures an instance is excluded from decisions until its pause is over."""

    async def test() -> None:
        async with scene(completes, urls=[unreachable()]) as here:
            excluded: list[list[str]] = []
            while excluded != [["e0"]]:
                here.scheduler.asked.clear()
                assert (await here.post()).status_code == 200
                excluded = [list(one.exclude_instance_ids) for one in here.scheduler.asked]
                assert excluded in ([[], ["e0"]], [["e0"]])

    run(test)


def test_failed_instances_are_tried_if_no_other_is_left() -> None:
    """An instance that failed recently is better than none."""
    engine_back = Engine(answer=completes)

    async def test() -> None:
        await engine_back.start()
        await engine_back.stop()
        async with scene(urls=[engine_back.url]) as here:
            for _ in range(2):
                assert (await here.post()).status_code == 503
            await engine_back.start()
            assert (await here.post()).status_code == 200
            await engine_back.stop()

    run(test)


def test_a_hanging_engine_is_abandoned() -> None:
    """An engine that sends nothing in time costs its timeout, not the request."""

    async def test() -> None:
        async with scene(hangs, streams, first_byte_s=3.0) as here:
            assert (await here.post(stream=True)).content == b"".join(STREAM)
        async with scene(hangs, completes, answer_s=3.0) as here:
            assert (await here.post()).json() == COMPLETION

    run(test)


ENDS: list[tuple[Answer, dict[str, Any], int]] = [
    (drops, {}, 502),
    (hangs, {"first_byte_s": 0.05, "answer_s": 0.05}, 504),
    (answers(500), {}, 500),
    (answers(503), {}, 503),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("answer", "options", "status"), ENDS, ids=["drops", "hangs", "500", "503"])
def test_all_engines_fail(answer: Answer, options: dict[str, Any], status: int, stream: bool) -> None:
    """The client gets an error in OpenAI's shape, the engine's own if there is one."""

    async def test() -> None:
        async with scene(answer, answer, attempts=2, **options) as here:
            response = await here.post(stream=stream)
            assert response.status_code == status
            error_of(response)
            assert {(await here.scheduler.released.get()).instance_id for _ in range(2)} == {"e0", "e1"}

    run(test)


def test_retries_have_a_budget() -> None:
    """When all engines fail, retries end with the budget instead of multiplying the load."""

    async def test() -> None:
        async with scene(drops, drops, drops, retry_ratio=0.0, server={}, max_concurrency=3) as here:
            for _ in range(10):
                await here.post()
            assert len(here.scheduler.asked) <= 10 + 3 + 10  # requests, retries, and calls that include the avoided
            assert await here.metric("block_gateway_retries_total") == 3

    run(test)


def test_next_best_when_the_schedulers_die_in_between() -> None:
    """Without another decision the request goes to the next best instance of the first one."""

    async def test() -> None:
        async with scene(hangs, completes) as here:

            async def kills_the_scheduler(call: Call) -> None:
                await here.scheduler.stop()
                call.die()

            here.engines[0].answer = kills_the_scheduler
            response = await here.post()
            assert (response.status_code, response.headers["x-block-policy"]) == (200, "next_best")
            assert response.headers["x-block-instance"] == "e1"

    run(test)


# After the first byte.


async def dies_in_stream(call: Call) -> None:
    """Send one event and a half, and die."""
    call.stream()
    await call.chunk(STREAM[0] + STREAM[1][:30])
    call.die()


async def stalls_in_stream(call: Call) -> None:
    """Send one event, and no more."""
    call.stream()
    await call.chunk(STREAM[0])
    await call.left()


async def garbles_stream(call: Call) -> None:
    """Send one event, then bytes that are not a chunk."""
    call.stream()
    await call.chunk(STREAM[0])
    call.writer.write(b"zzz\r\n")
    await call.left()


@pytest.mark.parametrize(
    ("answer", "idle_s", "code"),
    [
        (dies_in_stream, PATIENCE_S, "engine_failed"),
        (stalls_in_stream, 1.0, "engine_timeout"),
        (garbles_stream, PATIENCE_S, "engine_failed"),
    ],
)
def test_a_stream_that_breaks_ends_in_an_error_event(answer: Answer, idle_s: float, code: str) -> None:
    """The client reads whole events, then an error event, then a regular end."""

    async def test() -> None:
        async with scene(answer, streams, idle_s=idle_s, continue_streams="off") as here:
            response = await here.post(stream=True)
            assert response.status_code == 200
            first, error, rest = response.content.split(b"\n\n")
            assert (first + b"\n\n", rest) == (STREAM[0], b"")
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
            outcome = (await here.scheduler.released.get()).outcome
            assert (outcome.finish_reason, outcome.output_tokens) == (FAILED, 1)
            assert len(here.scheduler.asked) == 1
            assert await here.metric("block_gateway_streams_broken_total") == 1

    run(test)


def test_an_engine_ends_its_stream_with_an_error() -> None:
    """An engine's own error event passes unchanged, and counts as a failure."""
    stream = STREAM[0] + b'data: {"error": {"message": "out of memory"}}\n\n' + DONE

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(stream)
        call.end()

    async def test() -> None:
        async with scene(answer) as here:
            assert (await here.post(stream=True)).content == stream
            outcome = (await here.scheduler.released.get()).outcome
            assert (outcome.finish_reason, outcome.output_tokens) == (FAILED, 1)

    run(test)


# Clients that disconnect.


def test_a_client_disconnects_in_a_stream() -> None:
    """The engine's connection is closed at once, and the reservation is released with the outcome so far."""
    gone = asyncio.Event()

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0] + STREAM[1])
        await call.left()
        gone.set()

    async def test() -> None:
        async with scene(answer) as here:
            fields = {"model": "tiny", "prompt": "Say hello", "stream": True}
            async with here.client.stream("POST", "/v1/completions", json=fields) as response:
                await anext(response.aiter_raw())
            await gone.wait()
            release = await here.scheduler.released.get()
            assert (release.outcome.finish_reason, release.outcome.output_tokens) == (CANCELLED, 2)
            assert await here.metric("block_gateway_clients_left_total") == 1
            assert await here.metric("block_gateway_requests_under_way") == 0

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_disconnects_before_the_first_byte(stream: bool) -> None:
    """The engine's connection is closed at once."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def answer(call: Call) -> None:
        asked.set()
        await call.left()
        gone.set()

    async def test() -> None:
        async with scene(answer) as here:
            post = asyncio.create_task(here.post(stream=stream))
            await asked.wait()
            post.cancel()
            await gone.wait()
            assert (await here.scheduler.released.get()).outcome.finish_reason == CANCELLED

    run(test)


def test_a_client_disconnects_before_the_decision() -> None:
    """A decision that comes too late is released, and no engine is called."""

    async def test() -> None:
        async with scene(completes, schedule_s=20.0) as here:
            here.scheduler.open.clear()
            post = asyncio.create_task(here.post(headers={"x-request-id": "r"}))
            await here.scheduler.seen.get()
            post.cancel()
            while await here.metric("block_gateway_clients_left_total") < 1:
                pass
            here.scheduler.open.set()
            release = await here.scheduler.released.get()
            assert (release.request_id, release.instance_id) == ("r", "e0")
            assert not release.HasField("outcome")
            assert here.engines[0].calls == []

    run(test)


def test_a_client_disconnects_within_its_body() -> None:
    """An incomplete request is not placed."""

    async def test() -> None:
        async with scene(completes) as here:
            _, writer = await asyncio.open_connection(LOCAL, here.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            while await here.metric("block_gateway_clients_left_total") < 1:
                pass
            assert here.scheduler.asked == []

    run(test)


def test_a_slow_client_slows_the_engine_down() -> None:
    """The gateway does not buffer without limit what a client does not read."""
    piece = event("x" * 65_536)
    num_sent = 0
    stuck = asyncio.Event()

    async def answer(call: Call) -> None:
        nonlocal num_sent
        call.stream()
        for num_sent in range(1, 4000):  # noqa: B007 - used below
            try:
                async with asyncio.timeout(0.5):
                    await call.chunk(piece)
            except TimeoutError:
                break
        stuck.set()
        call.die()

    async def test() -> None:
        async with scene(answer) as here:
            body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
            _, writer = await asyncio.open_connection(LOCAL, here.port, limit=1024)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await stuck.wait()
            assert num_sent < 1000  # 64 MB; all the buffers between here and there hold far less
            writer.transport.abort()
            await here.scheduler.released.get()

    run(test)


# Schedulers.


def test_schedulers_are_called_in_turn() -> None:
    """Several schedulers share the work."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            for _ in range(6):
                await here.post()
            assert [len(one.asked) for one in here.schedulers] == [3, 3]

    run(test)


def test_a_session_has_its_scheduler() -> None:
    """All its requests go there while it replies, and sessions are spread over all schedulers."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            for number in range(40):
                await here.post(headers={"x-session-id": f"chat-{number % 20}"})
            of_each = [[asked.request.session_id for asked in one.asked] for one in here.schedulers]
            assert not set(of_each[0]) & set(of_each[1])
            assert all(of_each)
            await here.schedulers[0].stop()
            assert (await here.post(headers={"x-session-id": of_each[0][0]})).status_code == 200

    run(test)


def test_a_dead_scheduler_costs_nothing() -> None:
    """Another one decides and takes the releases; the dead one is not called until it returns."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            dead, alive = here.schedulers
            await dead.stop()
            for number in range(8):
                response = await here.post(headers={"x-request-id": str(number)})
                assert (response.status_code, response.headers["x-block-policy"]) == (200, "first")
            released = {(await alive.released.get()).request_id for _ in range(8)}
            assert released == {str(number) for number in range(8)}
            await dead.start()
            while not dead.asked:
                assert (await here.post()).status_code == 200

    run(test)


def test_a_hanging_scheduler_costs_its_timeout() -> None:
    """The next one is called; after two such failures the first one is skipped."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2, schedule_s=2.0) as here:
            hangs, decides = here.schedulers
            hangs.open.clear()
            without = 0
            while without < 4:
                asked = len(hangs.asked)
                assert (await here.post()).status_code == 200
                without = without + 1 if len(hangs.asked) == asked else 0
            assert len(decides.asked) >= without + 2
            hangs.open.set()

    run(test)


def test_without_schedulers_the_fallback_is_used() -> None:
    """Engines of the settings serve in turn, the reply names the policy, and failed engines are skipped."""

    async def test() -> None:
        async with scene(streams, streams) as other:
            urls = (unreachable(), *(engine.url for engine in other.engines))
            async with scene(engine_urls=urls) as here:
                await here.scheduler.stop()
                for _ in range(6):
                    response = await here.post(stream=True)
                    assert response.content == b"".join(STREAM)
                    assert response.headers["x-block-policy"] == "last_resort_round_robin"
                    assert "x-block-predicted-ttft-ms" not in response.headers
                counts = [len(engine.calls) for engine in other.engines]
                assert sum(counts) == 6
                assert min(counts) >= 2
                assert (await here.client.get("/ready")).status_code == 200

    run(test)


def test_without_schedulers_known_instances_serve() -> None:
    """The instances that decisions named serve in turn, for their own models, until a scheduler returns."""

    async def test() -> None:
        async with scene(completes, completes, completes, num_schedulers=2) as here:
            here.scheduler.instances[2].models[:] = ["other"]
            here.schedulers[1].instances[2].models[:] = ["other"]
            assert (await here.post()).headers["x-block-policy"] == "first"
            await here.scheduler.stop()
            assert (await here.post()).headers["x-block-policy"] == "first"
            await here.schedulers[1].stop()
            replies = [await here.post() for _ in range(4)]
            assert [reply.status_code for reply in replies] == [200] * 4
            assert {reply.headers["x-block-policy"] for reply in replies} == {"last_resort_round_robin"}
            assert sorted(reply.headers["x-block-instance"] for reply in replies) == ["e0", "e0", "e1", "e1"]
            assert (await here.post(model="other")).headers["x-block-instance"] == "e2"
            assert (await here.post(model="third")).status_code == 503
            await here.engines[0].stop()
            assert {(await here.post()).headers["x-block-instance"] for _ in range(4)} == {"e1"}
            await here.scheduler.start()
            while (await here.post()).headers["x-block-policy"] != "first":
                pass

    run(test)


def test_hanging_schedulers_do_not_delay_every_request() -> None:
    """Once their circuits are open, requests go to known instances at once, except for occasional trials."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2, schedule_s=0.5) as here:
            while (await here.post()).headers.get("x-block-policy") != "first":
                pass
            for one in here.schedulers:
                one.open.clear()
            asked = -1
            while asked < (asked := sum(len(one.asked) for one in here.schedulers)):
                assert (await here.post()).headers["x-block-policy"] == "last_resort_round_robin"
            for one in here.schedulers:
                one.open.set()
            while (await here.post()).headers.get("x-block-policy") != "first":
                pass

    run(test)


def test_a_busy_scheduler_is_respected() -> None:
    """A refusal for overload is passed on, even if instances are known."""

    async def test() -> None:
        async with scene(completes) as here:
            await here.post()
            here.scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 calls are under way")
            response = await here.post()
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert len(here.engines[0].calls) == 1

    run(test)


def test_without_schedulers_and_engines_requests_are_refused() -> None:
    """The client gets a 503 with Retry-After."""

    async def test() -> None:
        async with scene(completes) as here:
            await here.scheduler.stop()
            response = await here.post()
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert error_of(response)["code"] == "unavailable"

    run(test)


REFUSALS = [
    (grpc.StatusCode.NOT_FOUND, "request.model: 'x' is served by no instance", 404, "model_not_found", "model"),
    (grpc.StatusCode.INVALID_ARGUMENT, "request.max_tokens: is too large", 400, None, "max_tokens"),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 calls are under way", 429, "rate_limit_exceeded", None),
    (grpc.StatusCode.UNAVAILABLE, "no instance is known", 503, "unavailable", None),
    (grpc.StatusCode.INTERNAL, "internal error", 503, "unavailable", None),
]


@pytest.mark.parametrize(("status", "message", "http_status", "code", "param"), REFUSALS, ids=str)
def test_refusals_of_schedulers(
    status: grpc.StatusCode, message: str, http_status: int, code: str | None, param: str | None
) -> None:
    """An error of the request is the reply; an error of the scheduler's state tries the next scheduler."""

    async def test() -> None:
        async with scene(completes, num_schedulers=2) as here:
            for one in here.schedulers:
                one.refusal = (status, message)
            response = await here.post()
            assert response.status_code == http_status
            error = error_of(response)
            assert (error["code"], error["param"]) == (code, param)
            assert ("retry-after" in response.headers) == (http_status in (429, 503))
            assert len([*here.schedulers[0].asked, *here.schedulers[1].asked]) == (1 if http_status < 429 else 2)

    run(test)


def test_a_decision_without_an_instance() -> None:
    """A decision that names no reachable instance counts as a failure, and its reservation is released."""

    async def test() -> None:
        async with scene(drops, completes) as here:
            here.scheduler.instances.insert(1, common_pb2.Instance(instance_id="lie", engine_url="nonsense"))
            assert (await here.post()).headers["x-block-instance"] == "e1"
        async with scene(urls=["nonsense"]) as here:
            assert (await here.post()).status_code == 503
            assert (await here.scheduler.released.get()).instance_id == "e0"

    run(test)


def test_releases_wait_for_a_scheduler_that_is_away() -> None:
    """A release that fails is retried; a lost one is counted."""

    async def test() -> None:
        async with scene(completes) as here:

            async def kills_the_scheduler(call: Call) -> None:
                await here.scheduler.stop()
                call.whole(COMPLETION)

            here.engines[0].answer = kills_the_scheduler
            assert (await here.post(headers={"x-request-id": "kept"})).status_code == 200
            await here.scheduler.start()
            assert (await here.scheduler.released.get()).request_id == "kept"
            assert await here.metric('block_gateway_releases_total{result="lost"}') == 0

    run(test)
