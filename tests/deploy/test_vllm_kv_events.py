"""Prefix hits beside a real vLLM without the plug-in, by its KV events: each forecast equals what vLLM reports."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from predictor.kv_events.stream import COMPLETE, KvEventStream
from predictor.request import RequestFacts
from scheduler.prefix.kv_block_hash import kv_block_hashes
from services.engine_state.identity import short_hash
from services.kv_events.settings import KvEventSettings
from tests.deploy.engines import (
    BLOCK_SIZE,
    LONGEST,
    MODEL,
    NUM_BLOCKS,
    NUM_SEATS,
    PROFILE,
    START_S,
    Engine,
    need_vllm,
    tiny_model,
)
from tests.services.kv_events.lossy import lossy_network
from tests.services.predictor_server.running_mirrors import MirrorClient, forecast_by, mirror_of
from tests.services.predictor_server.running_sidecars import NEVER_S, READY

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm")]

NUM_SINGLE, NUM_BURSTS, BURST = 40, 6, 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """A running vLLM that publishes its KV events and exports no state."""
    need_vllm()
    folder = tmp_path_factory.mktemp("kv")
    config = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
        "endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r",
    }  # fmt: skip
    running = Engine(tiny_model(folder / "model"), None, folder / "log", "--kv-events-config", json.dumps(config))
    running.start()
    try:
        running.until(running.is_healthy, START_S)
        yield running, folder
    finally:
        running.kill()


class Prompts:
    """Draws prompts as token ids, most of which begin as earlier ones do."""

    def __init__(self, seed: int) -> None:
        """Start without earlier ones."""
        self._draw = random.Random(seed)
        self._drawn: list[list[int]] = []

    def next(self) -> list[int]:
        """Return a prompt; its characters are tokens."""
        draw = self._draw
        stem = draw.choice(self._drawn) if self._drawn and draw.random() < 0.7 else []
        stem = stem[: draw.randint(0, len(stem))]
        prompt = stem + [draw.randint(10, 90) for _ in range(draw.randint(1, 8 * BLOCK_SIZE))]
        self._drawn = [*self._drawn[-20:], prompt[: LONGEST - 200]]
        return self._drawn[-1]


def forecast_hits(client: MirrorClient, prompt: list[int]) -> int:
    """Forecast the hits of a prompt, named as schedulers name it."""
    names = tuple(short_hash(one) for one in kv_block_hashes(prompt, BLOCK_SIZE))
    request = RequestFacts(request_id="new", prompt_tokens=len(prompt), output_tokens=4, prefix_hashes=names)
    return forecast_by(client.mirror.source, request).prefix_hit_tokens


async def settled(stream: KvEventStream) -> None:
    """Wait until everything that the engine has published is known."""
    deadline_s, replays = time.monotonic() + START_S, stream.counts.replays
    while stream.counts.replays < replays + 2 or stream.certainty != COMPLETE:
        assert time.monotonic() < deadline_s, stream.counts
        await asyncio.sleep(0.02)


async def ask(client: MirrorClient, prompt: list[int], max_tokens: int) -> int:
    """Send a prompt through the proxy; return how many of its tokens vLLM says were cached."""
    reply = await client.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0},
        timeout=START_S,
    )
    assert reply.status_code == 200, reply.text
    return int((reply.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_hits_are_known_exactly(engine: tuple[Engine, Path]) -> None:
    """While events are lost, repeated and reordered, blocks are evicted, and the engine is killed and started again."""
    vllm, folder = engine

    async def compare(client: MirrorClient, stream: KvEventStream, prompts: Prompts, num: int) -> tuple[int, int]:
        predicted = reported = 0
        for number in range(num):
            prompt = prompts.next()
            await settled(stream)
            hits = forecast_hits(client, prompt)
            cached = await ask(client, prompt, random.Random(number).randint(1, 60))
            assert hits == cached, (number, hits, cached, stream.counts)
            predicted, reported = predicted + hits, reported + cached
        return predicted, reported

    async def test() -> None:
        events = KvEventSettings(
            endpoint=f"ipc://{folder}/lossy", replay_endpoint=f"ipc://{folder}/r", topic="kv", check_s=0.2
        )
        known = {"max_num_seqs": NUM_SEATS, "max_num_batched_tokens": 2048}
        async with (
            lossy_network(f"ipc://{folder}/e", f"ipc://{folder}/lossy", 1) as faults,
            mirror_of(
                vllm.url, profile=PROFILE, engine=known, kv_events=events,
                sidecar={"stall_s": NEVER_S, "health_s": START_S},
            ) as client,
        ):  # fmt: skip
            await client.rpc.until(lambda response: response.state == READY)
            stream = client.mirror.source.kv_events
            assert stream is not None
            for life in range(2):
                prompts = Prompts(life)
                predicted, reported = await compare(client, stream, prompts, NUM_SINGLE)
                assert predicted == reported == vllm.metric("vllm:prefix_cache_hits_total")
                assert predicted > 0
                for _ in range(NUM_BURSTS):  # they evict what others had cached
                    await asyncio.gather(*(ask(client, prompts.next(), 40) for _ in range(BURST)))
                    await compare(client, stream, prompts, 2)
                assert stream.index.num_blocks > NUM_BLOCKS // 2
                if life == 0:
                    vllm.kill()
                    vllm.start()
                    await asyncio.to_thread(vllm.until, vllm.is_healthy, START_S)
            assert stream.counts.restarts == 1
            assert stream.counts.lost == 0
            assert all(faults.values()), faults
            print(f"{stream.counts} {faults}")  # noqa: T201 - the figures of the run, shown by -s

    asyncio.run(test())
