"""Streams whose engine fails continue on another one: the client sees one answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from protos.block.v1 import common_pb2
from services.emulator.answers import AnswerLengths
from services.emulator.openai import Served, request_from
from services.emulator.replies import CompletionReply
from services.emulator.request_bodies import CHAT, COMPLETION
from services.http.sse import data_of
from tests.services.gateway.stubs import Answer, Call, Scene, scene
from tests.services.waiting import run, until

PATHS = ("/v1/completions", "/v1/chat/completions")
NUM_TOKENS = 12
SERVED = Served(model="tiny", max_model_len=4096, lengths=AnswerLengths(median_tokens=30, spread=0.5))
COMMENT = b": x-block-migrations: "
ERROR = b'data: {"error": {"message": "the engine core is dead", "code": 500}}\n\ndata: [DONE]\n\n'


def fields_of(path: str, **more: Any) -> dict[str, Any]:
    """A request for a stream."""
    content = "Tell me of the sea"
    asked = {"prompt": content} if path == PATHS[0] else {"messages": [{"role": "user", "content": content}]}
    return {"model": "tiny", "stream": True, "max_tokens": NUM_TOKENS, **asked, **more}


def events_of(call: Call) -> list[bytes]:
    """The events with which an emulated engine answers."""
    kind = CHAT if call.target == PATHS[1] else COMPLETION
    request = request_from(kind, json.loads(call.body), {}, call.headers["x-request-id"], SERVED)
    reply, num = CompletionReply(request, 1_700_000_000), request.answer.num_tokens
    text = reply.first() + b"".join(reply.events(place, place + 1) for place in range(num))
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def answers(num_events: float = math.inf, then: Callable[[Call], Any] = Call.die) -> Answer:
    """Answer in full, or fail after a number of events."""

    async def answer(call: Call) -> None:
        call.stream()
        for number, event in enumerate(events_of(call)):
            if number >= num_events:
                ended = then(call)
                if ended is not None:
                    await ended
                return
            await call.chunk(event)
        call.end()

    return answer


async def reports_failure(call: Call) -> None:
    """Say that the engine failed, as vLLM does when its core dies."""
    await call.chunk(ERROR)
    call.end()


def read(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events of a stream, but for [DONE], and how often it moved."""
    *found, last = data_of(content)
    assert last == b"[DONE]"
    return [json.loads(event) for event in found], content.count(COMMENT)


def choices(events: list[dict[str, Any]]) -> list[Any]:
    """What the events say."""
    return [event["choices"] for event in events if event["choices"]]


async def results(here: Scene) -> dict[str, float]:
    """The counts of streams whose engine failed, by result."""
    lines = (await here.client.get("/metrics")).text.splitlines()
    name = 'block_gateway_migrations_total{result="'
    return {
        line.removeprefix(name).partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name)
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["token-ids", "text"])
@pytest.mark.parametrize("then", [Call.die, Call.end, reports_failure])
def test_the_client_sees_one_stream(path: str, mode: str, then: Callable[[Call], Any]) -> None:
    """Its text and its usage are those of an engine that does not fail."""

    async def test() -> None:
        fields = fields_of(path, stream_options={"include_usage": True})
        async with scene(answers(), answers(5, then), answers(), continue_streams=mode) as here:
            whole, num = read((await here.post(path, **fields)).content)
            assert num == 0
            here.scheduler.instances.pop(0)
            events, num = read((await here.post(path, **fields, headers={"x-request-id": "r"})).content)
            assert num == 1
            assert choices(events) == choices(whole)
            assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
            assert events[-1]["usage"]["prompt_tokens"] == whole[-1]["usage"]["prompt_tokens"]
            assert len({event["id"] for event in events}) == 1
            assert await results(here) == {"continued": 1}
            assert await here.metric("block_gateway_streams_broken_total") == 0
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="failed"}') == 0
            assert await here.metric('block_gateway_output_tokens_total{model="tiny"}') == 2 * NUM_TOKENS

    run(test)


def test_the_rest_is_placed_as_a_request_of_its_own() -> None:
    """Without the instance that failed, with the longer prompt, what is left to answer, and the deadline that is left."""

    async def test() -> None:
        async with scene(answers(5), answers()) as here:
            headers = {"x-request-id": "r", "x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "1000"}
            await here.post(**fields_of(PATHS[0]), headers=headers)
            first, rest = here.scheduler.asked
            assert rest.exclude_instance_ids == ["e0"]
            assert (rest.request.request_id, rest.request.continues_request_id) == ("r-c1", "r")
            assert rest.request.prompt_tokens > first.request.prompt_tokens
            assert rest.request.max_tokens == NUM_TOKENS - 5
            assert 500 < rest.request.slo.ttft_s < 605
            assert rest.request.arrival_unix_s > first.request.arrival_unix_s
            assert here.engines[1].calls[0].headers["x-request-id"] == "r-c1"
            releases = {(one.request_id, one.instance_id): one.outcome for one in await released(here, 2)}
            assert releases["r", "e0"].finish_reason == common_pb2.FINISH_REASON_FAILED
            assert releases["r-c1", "e1"].finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert releases["r-c1", "e1"].output_tokens == NUM_TOKENS - 5
            assert releases["r-c1", "e1"].finished_unix_s > releases["r", "e0"].finished_unix_s

    run(test)


async def released(here: Scene, num: int) -> list[common_pb2.ReleaseRequest]:
    """The first releases."""
    return [await here.scheduler.released.get() for _ in range(num)]


def test_deadlines_count_over_all_engines() -> None:
    """Every token counts once, from the arrival of the client's request."""

    async def test() -> None:
        async with scene(answers(5), answers()) as here:
            headers = {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "600000"}
            await here.post(**fields_of(PATHS[0]), headers=headers)
            assert await here.metric("block_gateway_tokens_due_total") == NUM_TOKENS
            assert await here.metric("block_gateway_tokens_on_time_total") == NUM_TOKENS
            assert (
                await here.metric('block_gateway_targets_attained_total{class="real-time",priority="0",target="slo"}')
                == 1
            )

    run(test)


@pytest.mark.parametrize(("num_failing", "num_moves", "result"), [(2, 2, "continued"), (3, 2, "limit")])
def test_a_stream_moves_at_most_twice(num_failing: int, num_moves: int, result: str) -> None:
    """Then it breaks with an error event, after what it has."""

    async def test() -> None:
        async with scene(*(answers(3) for _ in range(num_failing)), answers()) as here:
            content = (await here.post(**fields_of(PATHS[0]))).content
            assert content.count(COMMENT) == num_moves
            assert result in await results(here)
            assert len(here.engines[-1].calls) == (result == "continued")
            text = "".join(json.loads(event)["choices"][0]["text"] for event in data_of(content) if b'"text"' in event)
            assert len(text.split()) == (NUM_TOKENS if result == "continued" else 9)
            assert (b'"engine_failed"' in content) == (result == "limit")
            assert await here.metric("block_gateway_tokens_due_total") == 0  # without targets

    run(test)


@pytest.mark.parametrize(
    ("fields", "options", "result"),
    [
        ({"logprobs": 1}, {}, "logprobs"),
        ({}, {"continue_streams": "off"}, "off"),
        ({}, {}, "no_instance"),
        ({}, {"retry_ratio": 0.0, "max_concurrency": 1}, "no_instance"),
        ({"prompt": [1, 2, 3]}, {"continue_streams": "text"}, "no_token_ids"),
    ],
)
def test_streams_that_break_say_why(fields: dict[str, Any], options: dict[str, Any], result: str) -> None:
    """The reason is counted; the client gets an error event after the tokens that came."""

    async def fails(call: Call) -> None:
        call.stream()
        body = {name: value for name, value in json.loads(call.body).items() if name != "logprobs"}
        call.body = json.dumps(body).encode()
        for event in events_of(call)[:2]:
            await call.chunk(event)
        call.die()

    async def test() -> None:
        async with scene(fails, **options) as here:
            content = (await here.post(**fields_of(PATHS[0], **fields))).content
            assert b'"engine_failed"' in content
            assert await results(here) == {result: 1}
            assert await here.metric("block_gateway_streams_broken_total") == 1
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="failed"}') == 1
            assert (await here.scheduler.released.get()).outcome.output_tokens == 2

    run(test)


def test_an_engine_that_stalls() -> None:
    """After `idle_s` without a token the stream continues elsewhere."""

    async def test() -> None:
        async with scene(answers(4, Call.left), answers(), idle_s=1.0) as here:
            events, num = read((await here.post(**fields_of(PATHS[0]))).content)
            assert (len(choices(events)), num) == (NUM_TOKENS, 1)

    run(test)


@pytest.mark.parametrize("num_events", [NUM_TOKENS, NUM_TOKENS + 1])
def test_an_end_that_is_missing_needs_no_engine(num_events: int) -> None:
    """All tokens came, but not the usage or [DONE]: the gateway writes them."""

    async def test() -> None:
        async with scene(answers(num_events)) as here:
            fields = fields_of(PATHS[0], stream_options={"include_usage": True})
            events, num = read((await here.post(**fields)).content)
            assert (events[-1]["usage"]["completion_tokens"], num) == (NUM_TOKENS, 0)
            assert await results(here) == {"ended": 1}
            assert await here.metric("block_gateway_streams_broken_total") == 0

    run(test)


def test_a_client_that_leaves_while_its_stream_continues() -> None:
    """The second engine's connection is closed, and its reservation is released."""

    async def test() -> None:
        gone = asyncio.Event()

        async def left(call: Call) -> None:
            await call.left()
            gone.set()

        async with scene(answers(2), answers(3, left)) as here:
            fields = fields_of(PATHS[0])
            async with here.client.stream("POST", PATHS[0], json=fields) as response:
                async for piece in response.aiter_raw():
                    if COMMENT in piece:
                        break
            await gone.wait()
            ends = {one.instance_id: one.outcome.finish_reason for one in await released(here, 2)}
            assert ends["e1"] == common_pb2.FINISH_REASON_CANCELLED

    run(test)


async def dies(call: Call) -> None:
    """Fail without a reply."""
    call.die()


async def refuses(call: Call) -> None:
    """Refuse the request."""
    call.whole({"error": {"message": "no"}}, 400)


@pytest.mark.parametrize(
    ("others", "reason", "num_tokens"),
    [((dies, answers()), "length", NUM_TOKENS), ((dies,), "failed", 3), ((refuses,), "failed", 3)],
)
def test_an_answer_counts_once(others: tuple[Answer, ...], reason: str, num_tokens: int) -> None:
    """However many engines fail to continue it."""

    async def test() -> None:
        async with scene(answers(3), *others) as here:
            await here.post(**fields_of(PATHS[0]))
            assert await here.metric("block_gateway_finished_total") == 1
            assert await here.metric(f'block_gateway_finished_total{{model="tiny",reason="{reason}"}}') == 1
            assert await here.metric("block_gateway_output_tokens_total") == num_tokens
            assert await here.metric("block_gateway_ttft_seconds_count") == 1
            assert len(await released(here, 1 + len(others))) == 1 + len(others)

    run(test)


async def left_at(here: Scene) -> bool:
    """Whether the gateway knows that its client has left."""
    return await here.metric("block_gateway_clients_left_total") == 1


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_client_that_leaves_before_another_engine_continues(is_placed: bool) -> None:
    """Its answer counts once, as cancelled; both reservations are released."""

    async def test() -> None:
        asked = asyncio.Event()

        async def hangs(call: Call) -> None:
            asked.set()
            await call.left()

        async def holds(call: Call) -> None:
            if not is_placed:
                here.scheduler.open.clear()
            call.die()

        async with scene(answers(3, holds), hangs) as here:
            async with here.client.stream("POST", PATHS[0], json=fields_of(PATHS[0])):
                if is_placed:
                    await asked.wait()
                else:
                    await here.scheduler.seen.get()
                    await here.scheduler.seen.get()
            failed = await here.scheduler.released.get()
            assert (failed.instance_id, failed.outcome.finish_reason) == ("e0", common_pb2.FINISH_REASON_FAILED)
            if not is_placed:
                await until(lambda: left_at(here))
                here.scheduler.open.set()
            left = await here.scheduler.released.get()
            assert (left.request_id[-3:], left.instance_id) == ("-c1", "e1")
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="cancelled"}') == 1
            assert await here.metric("block_gateway_finished_total") == 1
            assert await here.metric("block_gateway_output_tokens_total") == 3

    run(test)
