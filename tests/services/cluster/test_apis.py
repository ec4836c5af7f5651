"""The official clients drive every endpoint through a running cluster, with faults."""

from __future__ import annotations

import asyncio
import io
import math
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from services.emulator.pooling import embedding
from services.emulator.tokens import token_ids
from tests.services.cluster.living import ENGINES, MODEL, Living
from tests.services.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

HI: Any = [{"role": "user", "content": "Tell me of the sea"}]
NUM_TOKENS = 6
FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The official clients of the gateway."""

    of_openai: openai.AsyncOpenAI
    of_anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients(live: Living) -> AsyncIterator[Clients]:
    """Open them; what fails is not sent again by them."""
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    async with (
        openai.AsyncOpenAI(base_url=f"{live.gateway}/v1", **options) as of_openai,
        anthropic.AsyncAnthropic(base_url=live.gateway, **options) as of_anthropic,
    ):
        yield Clients(of_openai=of_openai, of_anthropic=of_anthropic)


def wav(seconds: int) -> bytes:
    """Write silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(8000)
        sound.writeframes(b"\x80" * 8000 * seconds)
    return file.getvalue()


def test_responses(live: Living) -> None:
    """Whole, streamed, continued, requested again and in the background."""

    async def test() -> None:
        async with clients(live) as here:
            client = here.of_openai.responses
            first = await client.create(
                model=MODEL, input="Tell me", instructions="Be brief", max_output_tokens=NUM_TOKENS
            )
            assert (first.status, first.usage and first.usage.output_tokens) == ("incomplete", NUM_TOKENS)
            again = await client.create(
                model=MODEL, input="Tell me", instructions="Be brief", max_output_tokens=NUM_TOKENS
            )
            assert again.output_text == first.output_text
            stream = await client.create(model=MODEL, input=HI, max_output_tokens=NUM_TOKENS, stream=True)
            events = [event async for event in stream]
            assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert events[-1].type == "response.completed"
            assert text == events[-1].response.output_text
            more = await client.create(model=MODEL, input="More", previous_response_id=first.id, max_output_tokens=2)
            assert more.usage is not None
            assert first.usage is not None
            assert more.usage.input_tokens > first.usage.input_tokens
            assert (await client.retrieve(first.id)).output_text == first.output_text
            later = await client.create(model=MODEL, input="Later", background=True, max_output_tokens=NUM_TOKENS)

            async def is_done() -> bool:
                found = await client.retrieve(later.id)
                assert found.status != "failed", found.error
                return found.status == "incomplete"

            await until(is_done)
            with pytest.raises(openai.NotFoundError):
                await client.retrieve("resp_unknown")

    live.run(test())


def test_messages(live: Living) -> None:
    """Whole and streamed, with usage; their tokens can be counted before."""

    async def test() -> None:
        async with clients(live) as here:
            client = here.of_anthropic.messages
            count = await client.count_tokens(model=MODEL, messages=HI, system="Be brief")
            whole = await client.create(model=MODEL, messages=HI, system="Be brief", max_tokens=NUM_TOKENS)
            usage = whole.usage
            assert (whole.stop_reason, usage.output_tokens) == ("max_tokens", NUM_TOKENS)
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
            async with client.stream(model=MODEL, messages=HI, system="Be brief", max_tokens=NUM_TOKENS) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
            assert final.usage.output_tokens == NUM_TOKENS
            with pytest.raises(anthropic.NotFoundError):
                await client.create(model="huge", messages=HI, max_tokens=2)
            with pytest.raises(anthropic.BadRequestError):
                await client.create(model=MODEL, messages=[], max_tokens=2)

    live.run(test())


def test_chats_completions_and_models(live: Living) -> None:
    """As before, beside the others."""

    async def test() -> None:
        async with clients(live) as here:
            client = here.of_openai
            chat = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=NUM_TOKENS)
            stream = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=NUM_TOKENS, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(texts) == chat.choices[0].message.content
            whole = await client.completions.create(model=MODEL, prompt="Tell me", max_tokens=NUM_TOKENS)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == NUM_TOKENS
            assert [model.id async for model in client.models.list()] == [MODEL]

    live.run(test())


def test_embeddings_scores_and_tokens(live: Living) -> None:
    """What generates nothing is computed by an engine, and counted; a long list is one request."""

    async def test() -> None:
        async with clients(live) as here:
            texts = [f"text number {number} of many" for number in range(40)]  # together longer than a context
            found = await here.of_openai.embeddings.create(model=MODEL, input=texts)
            assert found.usage.prompt_tokens == sum(len(token_ids(text)) for text in texts)
            expected = embedding(token_ids(texts[7])).tolist()
            assert all(math.isclose(one, other) for one, other in zip(found.data[7].embedding, expected, strict=True))
            url = live.gateway
            ranked = await live.client.post(f"{url}/v1/rerank", json={"query": texts[3], "documents": texts[:5]})
            assert ranked.headers["x-block-predicted-e2e-ms"]
            assert ranked.json()["results"][0]["index"] == 3
            for path, body in (
                ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
                ("/pooling", {"input": "a"}),
                ("/classify", {"input": "a"}),
                ("/v2/embed", {"texts": ["a"]}),
            ):
                reply = await live.client.post(f"{url}{path}", json={"model": MODEL, **body})
                assert reply.status_code == 200, reply.text
            tokens = (await live.client.post(f"{url}/tokenize", json={"prompt": "Tell me"})).json()["tokens"]
            text = await live.client.post(f"{url}/detokenize", json={"tokens": tokens})
            assert text.json() == {"prompt": "Tell me"}
            rendered = await live.client.post(f"{url}/v1/completions/render", json={"prompt": "Tell me"})
            assert rendered.json()[0]["token_ids"] == tokens

    live.run(test())


def test_audio(live: Living) -> None:
    """Transcripts, whole and streamed, translations and speech."""

    async def test() -> None:
        async with clients(live) as here:
            audio, sound = here.of_openai.audio, ("sea.wav", wav(1))
            whole = await audio.transcriptions.create(model=MODEL, file=sound)
            stream: Any = await audio.transcriptions.create(model=MODEL, file=sound, stream=True)
            assert len([event async for event in stream]) > 1
            assert whole.text
            form: Any = {"files": {"file": sound}, "data": {"model": MODEL}}  # the client warns about translations
            translated = await live.client.post(f"{live.gateway}/v1/audio/translations", **form)
            assert translated.json()["text"] == whole.text
            assert (await audio.speech.create(model=MODEL, voice="alloy", input="Hello")).content[:4] == b"RIFF"

    live.run(test())


def test_an_engine_that_refuses_costs_a_retry(live: Living) -> None:
    """Every endpoint is served by another engine."""

    async def test() -> None:
        async with clients(live) as here:
            for engine in ENGINES[:2]:
                await live.order(engine, refuse=True)
            try:
                for _ in range(4):
                    await here.of_openai.responses.create(model=MODEL, input="Tell me", max_output_tokens=2)
                    await here.of_anthropic.messages.create(model=MODEL, messages=HI, max_tokens=2)
                    await here.of_openai.embeddings.create(model=MODEL, input="Tell me")
                    await here.of_openai.audio.transcriptions.create(model=MODEL, file=("sea.wav", wav(1)))
            finally:
                for engine in ENGINES[:2]:
                    await live.order(engine)
            assert await live.metric("gateway-block", "block_gateway_retries_total", why="503") > 0

    live.run(test())


def test_an_engine_killed_before_the_first_token_loses_no_request(live: Living) -> None:
    """Messages and responses that wait there, streamed or not, are served by the others."""

    async def test() -> None:
        async with clients(live) as here:
            for engine in ENGINES:
                await live.order(engine, hang=True)
            asked = [asyncio.create_task(one) for _ in range(3) for one in _requests(here)]
            await until(lambda: _all_waiting(live, len(asked)))
            back = await live.kill(ENGINES[0])
            for engine in ENGINES[1:]:
                await live.order(engine)
            assert await asyncio.gather(*asked) == [NUM_TOKENS] * len(asked)
            await until(back)

    live.run(test(), may_expire=True)


async def _all_waiting(live: Living, num: int) -> bool:
    waiting = [
        await live.metric(name, f"vllm:num_requests_{how}") for name in ENGINES for how in ("waiting", "running")
    ]
    return sum(waiting) >= num


def _requests(here: Clients) -> list[Any]:
    """Return requests, each of which returns the number of tokens of its answer."""

    async def whole_response() -> int:
        found = await here.of_openai.responses.create(model=MODEL, input="Tell me", max_output_tokens=NUM_TOKENS)
        assert found.usage is not None
        return found.usage.output_tokens

    async def streamed_response() -> int:
        stream = await here.of_openai.responses.create(
            model=MODEL, input="Tell me", max_output_tokens=NUM_TOKENS, stream=True
        )
        return len([event async for event in stream if event.type == "response.output_text.delta"])

    async def whole_message() -> int:
        found = await here.of_anthropic.messages.create(model=MODEL, messages=HI, max_tokens=NUM_TOKENS)
        return found.usage.output_tokens

    async def streamed_message() -> int:
        stream = await here.of_anthropic.messages.create(model=MODEL, messages=HI, max_tokens=NUM_TOKENS, stream=True)
        return len([event async for event in stream if event.type == "content_block_delta"])

    return [whole_response(), streamed_response(), whole_message(), streamed_message()]
