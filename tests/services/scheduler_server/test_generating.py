"""Generate: a response streamed from the chosen engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.block.v1 import common_pb2, scheduler_pb2
from tests.services.scheduler_server.running import (
    CANCELLED,
    FAILED,
    LENGTH,
    ChangingSource,
    cluster,
    refused,
    run,
    scheduler,
    text_of,
    until,
)


def test_a_stream_begins_with_the_decision_and_ends_with_the_outcome() -> None:
    """In between is the response; its reservation ends, and the sidecar gets the outcome."""

    async def test() -> None:
        async with cluster() as (client, stubs, behind):
            events = await client.generate(parameters={"temperature": 0.5, "top_k": 3, "stop": ["x"]})
            assert [event.WhichOneof("event") for event in events] == ["decision", *["chunk"] * 3, "outcome"]
            assert events[0].decision.instance.instance_id == "a"
            assert text_of(events) == "Once upon a time"
            assert events[3].chunk.finish_reason == "length"
            outcome = events[-1].outcome
            assert (outcome.finish_reason, outcome.output_tokens, outcome.prompt_tokens) == (LENGTH, 3, 7)
            assert outcome.prefix_hit_tokens == 4
            assert 0 < outcome.ttft_s <= outcome.e2e_s
            body = behind[0].bodies[0]
            assert (body["prompt"], body["max_tokens"], body["model"], body["stream"]) == ("Tell me", 9, "m", True)
            assert (body["temperature"], body["top_k"], body["stop"]) == (0.5, 3, ["x"])
            assert isinstance(body["top_k"], int)
            assert b"x-request-id: r1" in behind[0].heads[0]
            await until(lambda: bool(stubs[0].outcomes))
            assert not stubs[0].held
            assert stubs[0].outcomes[0].forecast == events[0].decision.forecast

    run(test)


def test_a_conversation_and_token_ids_are_sent_as_such() -> None:
    """Chats go to the chat endpoint; token ids set the length of the prompt."""

    async def test() -> None:
        async with cluster(1) as (client, stubs, behind):
            request = client.request(output_tokens=4, prompt_tokens=0, ignore_eos=True, max_tokens=4)
            chat = scheduler_pb2.GenerateRequest(request=request)
            chat.messages.add_struct().update({"role": "user", "content": "Hello there"})
            assert text_of([event async for event in client.stub.Generate(chat)]) == "Once upon a time"
            assert behind[0].heads[0].startswith(b"post /v1/chat/completions")
            assert behind[0].bodies[0]["messages"] == [{"role": "user", "content": "Hello there"}]
            assert behind[0].bodies[0]["ignore_eos"] is True
            assert b"x-block-output-tokens: 4" in behind[0].heads[0]
            ids = scheduler_pb2.GenerateRequest(
                request=client.request(prompt_tokens=0), prompt_token_ids=scheduler_pb2.TokenIds(ids=[5, 6, 7])
            )
            assert text_of([event async for event in client.stub.Generate(ids)]) == "Once upon a time"
            assert behind[0].bodies[1]["prompt"] == [5, 6, 7]
            assert stubs[0].questions[-1].requests[0].prompt_tokens == 3

    run(test)


@pytest.mark.parametrize("failure", ["unreachable", "500", "503", "429", "breaks", "nonsense", "error"])
def test_before_the_first_token_another_engine_is_tried(failure: str) -> None:
    """The client gets both decisions and one whole response; the first reservation is released as failed."""

    async def test() -> None:
        async with cluster() as (_, stubs, behind):
            if failure == "unreachable":
                stubs[0].engine_url = "http://127.0.0.1:1"
            elif failure.isdigit():
                behind[0].status = int(failure)
            elif failure == "breaks":
                behind[0].breaks_after = 0
            else:
                behind[0].raw_events = [b"{" if failure == "nonsense" else b'{"error": {"message": "out of memory"}}']
            async with scheduler(stubs) as client:
                events = await client.generate()
            assert [event.decision.instance.instance_id for event in events[:2]] == ["a", "b"]
            assert text_of(events) == "Once upon a time"
            assert events[-1].outcome.instance_id == "b"
            await until(lambda: bool(stubs[0].outcomes and stubs[1].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED
            assert not stubs[0].held
            assert not stubs[1].held

    run(test)


def test_an_engine_that_hangs_before_the_first_token_is_given_up() -> None:
    """Another engine is tried, and the connection to the first one is closed."""

    async def test() -> None:
        async with cluster(first_token_s=1.0) as (client, stubs, behind):
            behind[0].hold, behind[0].hold_at = asyncio.Event(), 0
            events = await client.generate()
            assert [event.decision.instance.instance_id for event in events[:2]] == ["a", "b"]
            assert text_of(events) == "Once upon a time"
            assert events[-1].outcome.ttft_s > 1.0
            await behind[0].left.wait()
            await until(lambda: not stubs[0].held)

    run(test)


def test_an_engine_that_stalls_after_the_first_token_fails_the_request() -> None:
    """A response that has started is not restarted on another engine."""

    async def test() -> None:
        async with cluster(idle_s=1.0, continue_streams="off") as (client, stubs, behind):
            behind[0].hold = asyncio.Event()
            assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith("a: ")
            await behind[0].left.wait()
            await until(lambda: bool(stubs[0].outcomes))
            assert (stubs[0].outcomes[0].finish_reason, stubs[0].outcomes[0].output_tokens) == (FAILED, 1)
            assert not stubs[0].held
            assert not behind[1].bodies

    run(test)


def test_a_failure_after_the_first_token_is_returned() -> None:
    """A partial response is not restarted."""

    async def test() -> None:
        async with cluster(continue_streams="off") as (client, stubs, behind):
            behind[0].breaks_after = 2
            message = await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)
            assert message.startswith("a: ")
            await until(lambda: bool(stubs[0].outcomes))
            assert stubs[0].outcomes[0].finish_reason == FAILED
            assert stubs[0].outcomes[0].output_tokens == 2
            assert not behind[1].bodies

    run(test)


def test_another_engine_continues_the_answer() -> None:
    """It gets the prompt, what the client has, and the limit that is left; the outcome is that of the whole."""

    async def test() -> None:
        async with cluster() as (client, stubs, behind):
            behind[0].breaks_after, behind[1].pieces = 2, [" a time"]
            events = await client.generate(parameters={"temperature": 0.5})
            assert text_of(events) == "Once upon a time"
            assert [event.WhichOneof("event") for event in events].count("decision") == 2
            first, rest = behind[0].bodies[0], behind[1].bodies[0]
            assert rest == {**first, "prompt": first["prompt"] + "Once upon", "max_tokens": 7}
            outcome = events[-1].outcome
            assert (outcome.output_tokens, outcome.finish_reason) == (3, common_pb2.FINISH_REASON_LENGTH)
            await until(lambda: bool(stubs[0].outcomes) and bool(stubs[1].outcomes))
            assert (stubs[0].outcomes[0].finish_reason, stubs[0].outcomes[0].output_tokens) == (FAILED, 2)
            assert stubs[1].outcomes[0].output_tokens == 1
            assert not any(stub.held for stub in stubs)

    run(test)


def test_an_answer_that_continues_by_token_ids() -> None:
    """Engines that return them are sent them; a client that asked for none sees none."""

    def event_of(event: dict[str, Any]) -> bytes:
        return json.dumps(event).encode()

    async def test() -> None:
        async with cluster() as (client, _, behind):
            behind[0].raw_events = [
                event_of({"choices": [{"text": "Once", "token_ids": [11], "prompt_token_ids": [5, 6]}]}),
                event_of({"choices": [{"text": " upon", "token_ids": [12, 13]}]}),
            ]
            behind[1].pieces = [" a time"]
            events = await client.generate()
            assert text_of(events) == "Once upon a time"
            assert not any(event.chunk.token_ids for event in events)
            assert behind[0].bodies[0]["return_token_ids"] is True
            assert (behind[1].bodies[0]["prompt"], behind[1].bodies[0]["max_tokens"]) == ([5, 6, 11, 12, 13], 6)

    run(test)


def test_a_request_that_an_engine_refuses_is_not_tried_elsewhere() -> None:
    """The error is of the request, not of the engine."""

    async def test() -> None:
        async with cluster() as (client, stubs, behind):
            behind[0].status = 400
            assert "the engine returned 400: by the test" in await refused(client.generate())
            assert not behind[1].bodies
            await until(lambda: not stubs[0].held)

    run(test)


def test_when_all_engines_fail_the_last_one_is_named() -> None:
    """Each is tried once."""

    async def test() -> None:
        async with cluster() as (client, stubs, behind):
            behind[0].status = behind[1].status = 500
            assert (await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)).startswith(
                "b: the engine returned 500"
            )
            assert [len(engine.bodies) for engine in behind] == [1, 1]
            await until(lambda: not stubs[0].held and not stubs[1].held)

    run(test)


def test_a_cancelled_call_stops_the_engine() -> None:
    """The connection to the engine is closed, and the reservation is released as cancelled."""

    async def test() -> None:
        async with cluster(1) as (client, stubs, behind):
            behind[0].hold = asyncio.Event()
            request = client.request(max_tokens=9, output_tokens=None)
            call = client.stub.Generate(scheduler_pb2.GenerateRequest(request=request, prompt="Tell me"))
            assert (await call.read()).HasField("decision")
            assert (await call.read()).chunk.text == "Once"
            call.cancel()
            await behind[0].left.wait()
            await until(lambda: bool(stubs[0].outcomes))
            assert stubs[0].outcomes[0].finish_reason == CANCELLED
            assert stubs[0].outcomes[0].output_tokens == 1
            assert not stubs[0].held

    run(test)


def test_the_outcome_of_a_stream_whose_instance_was_removed_is_recorded(tmp_path: Path) -> None:
    """The list drops instances that still stream; only their reservations can no longer be released."""

    async def test() -> None:
        path, source = tmp_path / "decisions.jsonl", ChangingSource()
        async with cluster(1) as (_, stubs, behind):
            source.instances = [stubs[0].instance]
            async with scheduler(source, record=str(path)) as client:
                behind[0].hold = asyncio.Event()
                request = client.request(max_tokens=9, output_tokens=None)
                call = client.stub.Generate(scheduler_pb2.GenerateRequest(request=request, prompt="Tell me"))
                assert (await call.read()).HasField("decision")
                assert (await call.read()).chunk.text == "Once"
                source.instances = []
                await until(lambda: client.count("block_instances") == 0)
                behind[0].hold.set()
                while not (event := await call.read()).HasField("outcome"):
                    pass
                assert event.outcome.finish_reason == LENGTH
                await until(lambda: client.count("block_releases_total", released="unknown_instance") == 1)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["decision", "outcome"]
        assert lines[1]["outcome"]["finish_reason"] == "FINISH_REASON_LENGTH"

    run(test)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"parameters": {"max_tokens": 3}}, "parameters.max_tokens: is set by request.max_tokens"),
        ({"parameters": {"stream": False}}, "parameters.stream: cannot be set here"),
        ({"parameters": {"n": 2}}, "parameters.n"),
        ({"policy": "blok"}, "did you mean block"),
        ({"request": common_pb2.Request(model="m")}, "request.request_id: is missing"),
    ],
)
def test_bad_requests_are_named(options: dict[str, Any], named: str) -> None:
    """Contradictions and unsupported parameters are refused before any sidecar is called."""

    async def test() -> None:
        async with cluster(1) as (client, stubs, _):
            assert named in await refused(client.generate(**options))
            message = scheduler_pb2.GenerateRequest(request=client.request())
            assert "input: is missing" in await refused(client.stub.Generate(message).read())
            assert not stubs[0].questions

    run(test)
