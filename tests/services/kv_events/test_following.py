"""KV events of emulated engines over ZeroMQ: what a subscriber and a mirror know is what the engine has."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry, generate_latest

from predictor.config import EngineConfig
from predictor.kv_events.stream import COMPLETE, PARTIAL, UNSURE, KvEventStream
from predictor.request import RequestFacts
from services.emulator.tokens import content_hashes, token_ids
from services.kv_events.metrics import KvEventCollectors, KvEventMetrics
from services.kv_events.settings import KvEventSettings
from services.kv_events.subscriber import KvEventSubscriber, stream_of, subscribed
from tests.services.emulator.running import Emulated, emulated
from tests.services.kv_events.lossy import lossy_network
from tests.services.predictor_server.running_mirrors import MirrorClient, forecast_by, mirror_of
from tests.services.predictor_server.running_sidecars import NEVER_S, READY, run
from tests.services.waiting import PATIENCE_S, until

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=512, num_gpu_blocks=65, max_model_len=512, block_size=16)
SMALL = {"state_file": "", "speed": 50.0}


def endpoints(folder: Path, *, topic: str = "kv") -> dict[str, Any]:
    """Return an engine's KV events below a folder, as vLLM's option."""
    return {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": topic,
        "endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r",
    }  # fmt: skip


def settings(folder: Path, *, name: str = "e", can_replay: bool = True, **more: Any) -> KvEventSettings:
    """Return how to follow them."""
    values = {"topic": "kv", "check_s": 0.1, **more}
    replay = f"ipc://{folder}/r" if can_replay else ""
    return KvEventSettings(endpoint=f"ipc://{folder}/{name}", replay_endpoint=replay, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """A running subscriber, its stream, and its metrics."""

    stream: KvEventStream
    subscriber: KvEventSubscriber
    registry: CollectorRegistry

    def metric(self, line: str) -> float:
        """Return one sample, by its name and labels."""
        lines = generate_latest(self.registry).decode().splitlines()
        return next(float(one.rpartition(" ")[2]) for one in lines if one.startswith(line))


@asynccontextmanager
async def following(values: KvEventSettings) -> AsyncIterator[Following]:
    """Follow an engine's events while the block runs."""
    stream, registry = stream_of(values), CollectorRegistry()
    async with subscribed(values, stream, KvEventMetrics(KvEventCollectors(registry), "one", stream)) as subscriber:
        yield Following(stream=stream, subscriber=subscriber, registry=registry)


def cached(engine: Emulated) -> Counter[int]:
    """Return the contents of an engine's blocks by their short hashes."""
    content = engine.driver.engine.state.blocks.view(np.ndarray)["content"]
    by_number = {number: name for name, number in engine.driver.engine.contents.items()}
    return Counter(by_number[one] for one in content[content >= 0].tolist())


def knows_all(here: Following, engine: Emulated) -> bool:
    """Return whether the index has exactly the blocks that the engine has."""
    contents = here.stream.index.contents
    return here.stream.certainty == COMPLETE and Counter(contents[contents != 0].tolist()) == cached(engine)


async def work(engine: Emulated, draw: random.Random, num: int) -> None:
    """Send requests that share beginnings, more than the cache can keep."""

    def one() -> None:
        stem = f"{draw.randint(0, 3)} " * draw.randint(10, 150)
        engine.complete(prompt=f"{stem}{draw.random()} end", max_tokens=draw.randint(1, 60))

    for _ in range(num):
        await asyncio.to_thread(one)


@pytest.mark.parametrize("seed", range(2))
def test_it_knows_the_cache_exactly_over_a_bad_network_and_restarts(seed: int, tmp_path: Path) -> None:
    """Batches are lost, repeated and reordered, and the engine is replaced twice by one with an empty cache."""
    draw = random.Random(seed)
    config = json.dumps(endpoints(tmp_path))

    async def life(engine: Emulated, here: Following) -> None:
        for _ in range(3):
            await work(engine, draw, 8)
            await until(lambda: knows_all(here, engine))

    async def test() -> None:
        async with (
            lossy_network(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/lossy", seed) as faults,
            following(settings(tmp_path, name="lossy")) as here,
        ):
            for _ in range(3):
                with emulated(tmp_path, CONFIG, kv_events_config=config, **SMALL) as engine:
                    await life(engine, here)
            assert all(faults.values())
            assert here.stream.counts.restarts >= 2
            assert here.stream.counts.lost == 0
            assert here.metric('block_kv_events_state{instance="one",state="complete"}') in (0.0, 1.0)
            assert here.metric('block_kv_event_repairs_total{instance="one",kind="replayed"}') > 0

    run(test())


def test_a_late_subscriber_asks_for_what_was_before(tmp_path: Path) -> None:
    """Without replays it knows a part; with another topic nothing, and says so once."""

    async def test() -> None:
        with emulated(tmp_path, CONFIG, kv_events_config=json.dumps(endpoints(tmp_path)), **SMALL) as engine:
            await work(engine, random.Random(3), 6)
            async with (
                following(settings(tmp_path)) as full,
                following(settings(tmp_path, can_replay=False)) as part,
                following(settings(tmp_path, can_replay=False, topic="other")) as other,
            ):
                await until(lambda: knows_all(full, engine))
                deadline = time.monotonic() + PATIENCE_S
                while part.stream.certainty != PARTIAL or not other.metric(
                    'block_kv_event_batches_total{instance="one",result="other_topic"}'
                ):
                    assert time.monotonic() < deadline
                    await work(engine, random.Random(time.monotonic()), 1)
                assert other.stream.certainty == UNSURE

    run(test())


def mirrored_forecast(client: MirrorClient, prompt: str) -> int:
    """Forecast the prefix hits of a prompt, as schedulers name it."""
    ids = token_ids(prompt)
    names = content_hashes(ids, CONFIG.block_size)
    request = RequestFacts(request_id="new", prompt_tokens=len(ids), output_tokens=4, prefix_hashes=names)
    return forecast_by(client.mirror.source, request).prefix_hit_tokens


def test_a_mirror_forecasts_hits_exactly_over_a_bad_network(tmp_path: Path) -> None:
    """They equal what the engine reports for each of many requests, with more prompts than the cache keeps."""
    draw = random.Random(11)

    async def test(engine: Emulated) -> None:
        url = str(engine.client.base_url).rstrip("/")
        events = settings(tmp_path, name="lossy")
        patient = {"stall_s": NEVER_S, "health_s": PATIENCE_S}
        publisher = engine.driver.kv_publisher
        assert publisher is not None
        async with (
            lossy_network(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/lossy", 1) as faults,
            mirror_of(url, engine={"max_num_seqs": 8}, kv_events=events, speed=50.0, sidecar=patient) as client,
        ):
            await client.rpc.until(lambda response: response.state == READY)
            stream = client.mirror.source.kv_events
            assert stream is not None
            prompts, hits, evicted = [], 0, 0
            for number in range(40):
                prompt = draw.choice(prompts)[: draw.randint(40, 2000)] if prompts and draw.random() < 0.6 else ""
                prompt += " ".join(str(draw.randint(0, 10**6)) for _ in range(draw.randint(5, 60)))
                prompts.append(prompt)
                await until(lambda: stream.index.serial > 0 and stream.counts.applied >= 0 and settled(stream, engine))
                predicted = mirrored_forecast(client, prompt)
                reply = await client.complete(prompt=prompt, max_tokens=draw.randint(1, 40), stream=False)
                usage = reply.json()["usage"]
                assert predicted == usage["prompt_tokens_details"]["cached_tokens"], number
                hits += predicted
                evicted += number > 20 and predicted == 0
            assert hits > 0
            assert any(faults.values())

    def settled(stream: KvEventStream, engine: Emulated) -> bool:
        contents = stream.index.contents
        return stream.certainty == COMPLETE and Counter(contents[contents != 0].tolist()) == cached(engine)

    with emulated(tmp_path, CONFIG, kv_events_config=json.dumps(endpoints(tmp_path)), **SMALL) as engine:
        run(test(engine))


INVALID = {
    "truncated": (b"kv", bytes(8), msgpack.packb([1.0, [{"type": "BlockStored"}], 0])[:-3]),
    "no sequence": (b"kv", b"1", msgpack.packb([1.0, [], 0])),
    "one frame": (b"kv",),
    "no list": (b"kv", bytes(8), msgpack.packb({"a": 1})),
    "a missing field": (b"kv", bytes(8), msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [1]}], 0])),
    "other types": (b"kv", bytes(8), msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"]}], 0])),
    "no number": (b"kv", bytes(8), msgpack.packb(["now", [], 0])),
    "random": (b"kv", bytes(8), random.Random(1).randbytes(500)),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_batch_is_one_line_and_harms_nothing(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted; the next valid batch is applied."""

    async def test() -> None:
        context = zmq.asyncio.Context()
        publisher = context.socket(zmq.PUB)
        publisher.bind(f"ipc://{tmp_path}/e")
        try:
            async with following(settings(tmp_path, can_replay=False)) as here:
                valid = msgpack.packb([1.0, [{"type": "AllBlocksCleared"}, {"type": "SomethingNew", "x": 1}], 0])
                while here.stream.counts.applied == 0:
                    for _ in range(3):
                        await publisher.send_multipart(INVALID[name])
                    await publisher.send_multipart((b"kv", bytes(8), valid))
                    await asyncio.sleep(0.05)
                assert here.metric('block_kv_event_batches_total{instance="one",result="invalid"}') >= 3
                assert here.metric('block_kv_events_unknown_total{instance="one"}') >= 1
                assert here.stream.certainty == COMPLETE
        finally:
            context.destroy(linger=0)

    with caplog.at_level("WARNING"):
        run(test())
    assert [record.getMessage() for record in caplog.records].count("KV events are ignored") == 1
