"""The official client against the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from protos.block.v1 import common_pb2
from tests.services.gateway.stubs import COMPLETION, DONE, LOCAL, Call, Scene, event, scene
from tests.services.security.key_files import key
from tests.services.waiting import run

KEY = "sk-test"
HI = [{"role": "user", "content": "Say hello"}]


async def chats(call: Call) -> None:
    """Reply to completions and chats, streamed or not, with usage on request."""
    body = json.loads(call.body)
    if body["model"] != "tiny":
        call.whole({"error": {"message": "no such model", "type": "x", "param": "model", "code": 404}}, 404)
        return
    chat = "messages" in body
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    if not body.get("stream"):
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello."}}
        call.whole({**COMPLETION, "object": "chat.completion", "choices": [choice]} if chat else COMPLETION)
        return
    call.stream()
    for piece in deltas() if chat else (event("Hello"), event(".", "stop")):
        await call.chunk(piece)
    if body.get("stream_options", {}).get("include_usage"):
        await call.chunk(b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": usage}).encode() + b"\n\n")
    await call.chunk(DONE)
    call.end()


def deltas() -> list[bytes]:
    """Write the events of a chat."""
    choices = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": {"content": "Hello"}, "finish_reason": None},
        {"delta": {"content": "."}, "finish_reason": "stop"},
    ]
    texts = [json.dumps({"id": "chat-1", "choices": [{"index": 0, **choice}]}) for choice in choices]
    return [f"data: {text}\n\n".encode() for text in texts]


@asynccontextmanager
async def clients(here: Scene, api_key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    """Open the official client."""
    async with openai.AsyncOpenAI(base_url=f"http://{LOCAL}:{here.port}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def test_completions() -> None:
    """Text completions, streamed or not, with usage."""

    async def test() -> None:
        async with scene(chats, keys=(key(KEY),)) as here, clients(here) as client:
            whole = await client.completions.create(model="tiny", prompt="Say hello", max_tokens=5)
            assert whole.choices[0].text == "Hello world!"
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 3
            stream = await client.completions.create(model="tiny", prompt="Say hello", stream=True)
            assert [chunk.choices[0].text async for chunk in stream] == ["Hello", "."]
            assert [model.id async for model in client.models.list()] == ["tiny"]

    run(test)


def test_chats() -> None:
    """Chats, streamed or not, with usage; outcomes contain the counts in any case."""

    async def test() -> None:
        async with scene(chats, keys=(key(KEY),)) as here, clients(here) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
            assert whole.choices[0].message.content == "Hello."
            for options in ({}, {"stream_options": {"include_usage": True}}):
                stream = await client.chat.completions.create(  # type: ignore[call-overload]
                    model="tiny", messages=HI, stream=True, **options
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello."
                assert (chunks[-1].usage is not None) == bool(options)
            outcomes = [(await here.scheduler.released.get()).outcome for _ in range(3)]
            assert [outcome.output_tokens for outcome in outcomes] == [3, 2, 2]
            assert {outcome.finish_reason for outcome in outcomes} == {common_pb2.FINISH_REASON_STOP}

    run(test)


def test_errors() -> None:
    """The client raises its own exceptions, by status, also for an error within a stream."""

    async def test() -> None:
        async with scene(chats, keys=(key(KEY),)) as here:
            async with clients(here, "wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            async with clients(here) as client:
                with pytest.raises(openai.NotFoundError):
                    await client.completions.create(model="huge", prompt="x")
                with pytest.raises(openai.BadRequestError, match="max_tokens") as refused:
                    await client.completions.create(model="tiny", prompt="x", max_tokens=-1)
                assert refused.value.param == "max_tokens"

                async def dies(call: Call) -> None:
                    call.stream()
                    await call.chunk(event("Hello"))
                    call.die()

                here.engines[0].answer = dies
                stream = await client.completions.create(model="tiny", prompt="x", stream=True)
                assert (await anext(stream)).choices[0].text == "Hello"
                with pytest.raises(openai.APIError, match="broke the connection"):
                    await anext(stream)
                await here.scheduler.stop()
                await here.engines[0].stop()
                with pytest.raises(openai.InternalServerError):
                    await client.completions.create(model="tiny", prompt="x")

    run(test)


def test_cancellation() -> None:
    """A stream that the client closes ends at the engine."""
    gone = asyncio.Event()

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(event("Hello"))
        await call.left()
        gone.set()

    async def test() -> None:
        async with scene(answer) as here, clients(here) as client:
            stream = await client.completions.create(model="tiny", prompt="x", stream=True)
            await anext(stream)
            await stream.close()
            await gone.wait()
            release = await here.scheduler.released.get()
            assert release.outcome.finish_reason == common_pb2.FINISH_REASON_CANCELLED

    run(test)
