"""Streams of real vLLM engines that are killed: another engine continues them, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cluster import Child
from services.http.sse import data_of
from tests.deploy.engines import MODEL, START_S, Engine, need_vllm, random_weights, tiny_model

pytestmark = pytest.mark.vllm

NUM_TOKENS, NUM_BEFORE = 80, 15
NAMES = ("a", "b", "c")
PATHS = ("/v1/completions", "/v1/chat/completions")
LIMIT_S = 300.0
COMMENT = b": x-block-migrations: 1\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Engines behind a gateway."""

    engines: dict[str, Engine]
    gateway: str
    runner: asyncio.Runner


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three engines of one model, whose text depends on the whole context, and a gateway that places in turn."""
    need_vllm()
    with serving(tmp_path_factory.mktemp("migration")) as running:
        yield running


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Run everything within a context."""
    model = random_weights(tiny_model(folder / "model"), seed=5)
    engines = {
        name: Engine(model, folder / f"{name}.state", folder / f"{name}.log", "--load-format", "auto") for name in NAMES
    }
    instances = [f"--instance={name}={engine.url},127.0.0.1:9" for name, engine in engines.items()]
    gateway = Child("gateway", "gateway", "--decide", "in-process", "--policy", "round_robin", *instances)
    with asyncio.Runner() as runner:
        try:
            for engine in engines.values():
                engine.start()
            for engine in engines.values():
                engine.until(engine.is_healthy, START_S)
            runner.run(gateway.start())
            yield Served(engines=engines, gateway=f"http://127.0.0.1:{gateway.port}", runner=runner)
        finally:
            runner.run(gateway.stop())
            for engine in engines.values():
                engine.kill()


def asked_at(path: str) -> dict[str, Any]:
    """A greedy request."""
    story = "Once upon a time there was an engine that did not live long."
    asked = {"prompt": story} if path == PATHS[0] else {"messages": [{"role": "user", "content": story}]}
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, **options, **asked}


def texts_of(content: bytes) -> list[str]:
    """The texts of a stream's events."""
    choices = [json.loads(event)["choices"] for event in data_of(content) if event != b"[DONE]"]
    found = [one[0] for one in choices if one]
    return [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in found]


def usage_of(content: bytes) -> dict[str, int]:
    """The usage at the end of a stream."""
    usage = json.loads([event for event in data_of(content) if event != b"[DONE]"][-1])["usage"]
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_outlives_its_engine(served: Served, path: str) -> None:
    """The text and the usage are what one engine alone gives; the engine's death is a pause."""

    async def test() -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            alone = next(engine.url for engine in served.engines.values() if engine.is_healthy())
            whole = (await client.post(f"{alone}{path}", json=asked_at(path))).content
            assert len(set(texts_of(whole))) > NUM_TOKENS // 2  # the text depends on what is before it
            received = b""
            async with client.stream("POST", f"{served.gateway}{path}", json=asked_at(path)) as response:
                victim = response.headers["x-block-instance"]
                async for piece in response.aiter_raw():
                    received += piece
                    if victim and received.count(b"data: ") > NUM_BEFORE:
                        served.engines[victim].kill()
                        victim = ""
            assert COMMENT in received
            assert "".join(texts_of(received)) == "".join(texts_of(whole))
            assert usage_of(received) == usage_of(whole)
            assert b'token_ids":[' not in received
            metrics = (await client.get(f"{served.gateway}/metrics")).text
            assert "block_gateway_streams_broken_total 0.0" in metrics

    served.runner.run(asyncio.wait_for(test(), LIMIT_S))
