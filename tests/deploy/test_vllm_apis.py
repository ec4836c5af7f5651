"""The official clients drive every endpoint that a real vLLM serves, through gateways."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from services.cluster import Child
from tests.deploy.engines import MODEL, START_S, Engine, need_vllm, tiny_model

pytestmark = pytest.mark.vllm

NUM_TOKENS = 6
LIMIT_S = 300.0
HI: Any = [{"role": "user", "content": "Tell me of the sea"}]
TEXT, EMBED = "text", "embed"
OPTIONS = {TEXT: (), EMBED: ("--runner", "pooling", "--convert", "embed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The URLs of gateways, one for an engine that generates and one for an engine that embeds."""

    urls: dict[str, str]
    runner: asyncio.Runner

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test on the loop that supervises the gateways."""

        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await test

        self.runner.run(limited())

    def openai(self, engine: str) -> openai.AsyncOpenAI:
        """Return a client of one of the gateways."""
        return openai.AsyncOpenAI(base_url=f"{self.urls[engine]}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        """Return a client of the gateway of the engine that generates."""
        return anthropic.AsyncAnthropic(base_url=self.urls[TEXT], api_key="none", max_retries=0, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two engines of the same tiny model, one of which embeds."""
    need_vllm()
    with pytest.MonkeyPatch.context() as patch, serving(tmp_path_factory.mktemp("apis"), patch) as running:
        yield running


@contextmanager
def serving(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Run everything within a context; the engines keep responses."""
    patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    model = tiny_model(folder / "model")
    engines = {
        name: Engine(model, folder / f"{name}.state", folder / f"{name}.log", *options)
        for name, options in OPTIONS.items()
    }
    gateways = {
        name: Child(
            f"gateway-{name}", "gateway", "--decide", "in-process", "--policy", "round_robin",
            f"--instance={name}={engine.url},127.0.0.1:9",
        )
        for name, engine in engines.items()
    }  # fmt: skip
    with asyncio.Runner() as runner:
        try:
            for engine in engines.values():
                engine.start()
            for engine in engines.values():
                engine.until(engine.is_healthy, START_S)
            for gateway in gateways.values():
                runner.run(gateway.start())
            urls = {name: f"http://127.0.0.1:{gateway.port}" for name, gateway in gateways.items()}
            yield Served(urls=urls, runner=runner)
        finally:
            for gateway in gateways.values():
                runner.run(gateway.stop())
            for engine in engines.values():
                engine.kill()


def test_responses(served: Served) -> None:
    """Whole, streamed, requested again and continued."""

    async def test() -> None:
        async with served.openai(TEXT) as client:
            asked: Any = {"model": MODEL, "max_output_tokens": NUM_TOKENS, "temperature": 0}
            whole = await client.responses.create(input="Tell me", instructions="Be brief", **asked)
            assert whole.usage is not None
            assert whole.usage.output_tokens == NUM_TOKENS
            stream = await client.responses.create(input=HI, stream=True, **asked)
            events = [event async for event in stream]
            assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
            assert events[-1].type == "response.completed"
            texts = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(texts) == events[-1].response.output_text
            assert (await client.responses.retrieve(whole.id)).output_text == whole.output_text
            more = await client.responses.create(input="More", previous_response_id=whole.id, **asked)
            assert more.usage is not None
            assert more.usage.input_tokens > whole.usage.input_tokens

    served.run(test())


def test_messages(served: Served) -> None:
    """Whole and streamed; their tokens can be counted before."""

    async def test() -> None:
        async with served.anthropic() as client:
            asked: Any = {"model": MODEL, "messages": HI, "system": "Be brief"}
            likeliest: Any = {"extra_body": {"temperature": 0}}
            count = await client.messages.count_tokens(**asked)
            whole = await client.messages.create(max_tokens=NUM_TOKENS, **likeliest, **asked)
            usage = whole.usage
            assert usage.output_tokens == NUM_TOKENS
            cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            assert usage.input_tokens + cached == count.input_tokens
            async with client.messages.stream(max_tokens=NUM_TOKENS, **likeliest, **asked) as stream:
                final = await stream.get_final_message()
            assert final.usage.output_tokens == NUM_TOKENS
            assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**asked, "model": "huge"}, max_tokens=2)

    served.run(test())


def test_chats_completions_and_tokens(served: Served) -> None:
    """The usual endpoints; and one that only the engine's OpenAPI document names."""

    async def test() -> None:
        async with (
            served.openai(TEXT) as client,
            httpx.AsyncClient(base_url=served.urls[TEXT], timeout=LIMIT_S) as plain,
        ):
            chat = await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=NUM_TOKENS)
            whole = await client.completions.create(model=MODEL, prompt="Tell me", max_tokens=NUM_TOKENS)
            assert chat.usage is not None
            assert whole.usage is not None
            assert (chat.usage.completion_tokens, whole.usage.completion_tokens) == (NUM_TOKENS, NUM_TOKENS)
            counted = (await plain.post("/tokenize", json={"model": MODEL, "prompt": "Tell me"})).json()
            assert counted["count"] == whole.usage.prompt_tokens
            text = await plain.post("/detokenize", json={"model": MODEL, "tokens": counted["tokens"]})
            assert text.status_code == 200, text.text
            body = {"model": MODEL, "messages": [HI, HI], "max_tokens": 2}
            batch = None
            while batch is None or batch.status_code == 503:  # an engine writes its first document slowly
                batch = await plain.post("/v1/chat/completions/batch", json=body)
            assert batch.headers["x-block-instance"] == TEXT, batch.text
            for path in ("/v1/load_lora_adapter", "/sleep", "/scale_elastic_ep", "/abort_requests"):
                assert (await plain.post(path, json={})).status_code == 404

    served.run(test())


def test_embeddings_and_scores(served: Served) -> None:
    """What generates nothing, with the engine's own counts."""

    async def test() -> None:
        async with (
            served.openai(EMBED) as client,
            httpx.AsyncClient(base_url=served.urls[EMBED], timeout=LIMIT_S) as plain,
        ):
            found = await client.embeddings.create(model=MODEL, input=["Tell me", "of the sea"])
            assert len(found.data) == 2
            assert math.isclose(sum(one * one for one in found.data[0].embedding), 1.0, rel_tol=1e-3)
            assert found.usage.prompt_tokens >= len("Tell me") + len("of the sea")
            pooled = await plain.post("/pooling", json={"model": MODEL, "input": "Tell me", "task": "embed"})
            assert pooled.status_code == 200, pooled.text
            body = {"model": MODEL, "query": "Tell me", "documents": ["of the sea", "Tell me"]}
            ranked = await plain.post("/v1/rerank", json=body)
            assert ranked.json()["results"][0]["index"] == 1, ranked.text

    served.run(test())
