"""What the gateway counts of requests with targets."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.http.sse import StreamReader
from tests.services.gateway.stubs import DONE, STREAM, Answer, Call, Scene, completes, event, scene, streams
from tests.services.waiting import run

GENEROUS = {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "600000"}
IMPOSSIBLE = {"x-slo-ttft-ms": "0.000001", "x-slo-tpot-ms": "0.000001"}
GROUP = {"class": "real-time", "priority": "0"}
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":9,"completion_tokens":6}}\n\n'


async def counted(here: Scene, **group: str) -> dict[str, float]:
    """The counters of a group by the ends of their names, and by target."""
    text = (await here.client.get("/metrics")).text
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            target = labels.pop("target", None)
            if labels == {**GROUP, **group} and sample.name.startswith("block_gateway_"):
                name = sample.name.removeprefix("block_gateway_").removesuffix("_total")
                values[name if target is None else f"{name}.{target}"] = sample.value
    return values


async def ask(here: Scene, headers: dict[str, str], **fields: Any) -> int:
    """Send a request; return the status."""
    body = {"model": "tiny", "prompt": "Say hello", "stream": True, **fields}
    return (await here.client.post("/v1/completions", json=body, headers=headers)).status_code


def test_a_stream_within_generous_targets() -> None:
    """All tokens count as on time, with the request's weight, class and priority."""

    async def test() -> None:
        async with scene(streams) as here:
            headers = {**GENEROUS, "x-block-weight": "2.5", "x-block-class": "best-effort", "x-block-priority": "3"}
            assert await ask(here, headers) == 200
            assert await counted(here, **{"class": "best-effort", "priority": "3"}) == {
                "tokens_due": 3, "tokens_on_time": 3, "possible_gain": 7.5, "gain": 7.5,
                "targets.ttft": 1, "targets.tpot": 1, "targets.slo": 1, "targets.deadlines": 1,
                "targets_attained.ttft": 1, "targets_attained.tpot": 1, "targets_attained.slo": 1,
                "targets_attained.deadlines": 1,
            }  # fmt: skip
            assert await counted(here) == {}

    run(test)


def test_a_stream_beyond_impossible_targets() -> None:
    """No token counts as on time; a target that is not there does not count."""

    async def test() -> None:
        async with scene(streams) as here:
            await ask(here, IMPOSSIBLE)
            await ask(here, {"x-slo-ttft-ms": "0.000001"})
            await ask(here, {"x-slo-tpot-ms": "600000"})
            values = await counted(here)
            assert (values["tokens_due"], values["tokens_on_time"], values["gain"]) == (4, 0, 0)
            assert (values["targets.ttft"], values["targets.tpot"], values["targets.slo"]) == (2, 2, 3)
            assert (values["targets_attained.ttft"], values["targets_attained.deadlines"]) == (0, 0)
            assert values["targets_attained.slo"] == 1  # of the one without a TTFT target

    run(test)


def test_what_does_not_count() -> None:
    """Requests without targets, responses in one piece, and requests that a client got wrong."""

    async def wrong(call: Call) -> None:
        call.whole({"error": "no"}, 400)

    async def test(answer: Answer, headers: dict[str, str], status: int) -> None:
        async with scene(answer) as here:
            assert await ask(here, headers) == status
            assert await counted(here) == {}

    run(lambda: test(streams, {"x-block-weight": "2"}, 200))
    run(lambda: test(wrong, GENEROUS, 400))

    async def one_piece() -> None:
        async with scene(completes) as here:
            assert await ask(here, GENEROUS, stream=False) == 200
            assert await counted(here) == {}

    run(one_piece)


@pytest.mark.parametrize("way", ["busy", "dies at once", "dies in its stream", "error in its stream"])
def test_a_failed_request_attains_nothing(way: str) -> None:
    """Whatever of its tokens came in time, they are possible gain that is lost; a retry is not counted twice."""

    async def answer(call: Call) -> None:
        if way == "busy":
            call.whole({"error": {"message": "full"}}, 429)
        elif way == "dies at once":
            call.die()
        else:
            call.stream()
            await call.chunk(STREAM[0])
            await call.chunk(STREAM[1])
            if way == "dies in its stream":
                call.die()
            else:
                await call.chunk(b'data: {"error": {"message": "out of memory"}}\n\n' + DONE)
                call.end()

    async def test() -> None:
        async with scene(answer, answer, continue_streams="off") as here:
            with suppress(httpx.RemoteProtocolError):  # the client's stream breaks as well
                await ask(here, GENEROUS)
            values = await counted(here)
            assert values["tokens_due"] == (2 if "stream" in way else 1)
            assert (values["tokens_on_time"], values["targets.slo"], values["targets_attained.slo"]) == (0, 1, 0)
            assert (values["targets.deadlines"], values["targets_attained.tpot"]) == (1, 0)

    run(test)


def test_lines_without_text_are_no_tokens() -> None:
    """The role, the usage and the end of a chat; where the usage counts more tokens than events, events share them."""
    reader = StreamReader()
    marks = []
    for time_s, piece in enumerate((ROLE, event("a"), event("b") + event("c", "stop"), USAGE, DONE)):
        reader.feed(piece)
        marks.append((reader.num_data, float(time_s)))
    ending = reader.ending()
    assert (ending.output_tokens, ending.has_count) == (6, True)
    assert list(reader.token_times(marks, ending))[:3] == [(0, 0.0), (2, 1.0), (6, 2.0)]
    reader, marks = StreamReader(), []
    stop = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}\n\n'
    for time_s, piece in enumerate((*map(event, "abcd"), stop, usage)):
        reader.feed(piece)
        marks.append((reader.num_data, float(time_s)))
    assert [so_far for so_far, _ in reader.token_times(marks, reader.ending())][:4] == [1, 2, 3, 4]
    for first in ((), (ROLE,)):
        reader, marks = StreamReader(), []
        for time_s, piece in enumerate((*first, event("a"), event("b") + event("c", "stop"), DONE)):
            reader.feed(piece)
            marks.append((reader.num_data, float(time_s)))
        ending = reader.ending()
        assert (ending.output_tokens, ending.has_count) == (3, False)
        assert [so_far for so_far, _ in reader.token_times(marks, ending)][len(first) :] == [1, 3, 4]


def test_a_chat_is_counted_by_its_usage() -> None:
    """Tokens are those of the usage, not the lines of data."""

    async def answer(call: Call) -> None:
        call.stream()
        for piece in (ROLE, event("a"), event("b") + event("c", "stop"), USAGE, DONE):
            await call.chunk(piece)
        call.end()

    async def test() -> None:
        async with scene(answer) as here:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            content = json.dumps(body).encode()
            await here.client.post("/v1/chat/completions", content=content, headers=GENEROUS)
            values = await counted(here)
            assert (values["tokens_due"], values["tokens_on_time"], values["targets_attained.deadlines"]) == (6, 6, 1)

    run(test)
