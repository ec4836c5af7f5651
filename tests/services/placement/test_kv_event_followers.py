"""Schedulers follow the KV events of listed instances, as long as they are listed."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from predictor.kv_events.stream import COMPLETE
from scheduler.prefix.kv_block_hash import SEED
from services.instances.instance import Instance, instance_from_flag
from services.placement.kv_event_followers import KvEventFollowers
from tests.services.emulator.running import emulated
from tests.services.kv_events.test_following import CONFIG, SMALL, cached, endpoints, until, work
from tests.services.predictor_server.running_sidecars import run


def listed(name: str, folder: Path) -> Instance:
    """Return an instance whose engine publishes below a folder."""
    return instance_from_flag(
        f"{name}=http://127.0.0.1:1,127.0.0.1:2,kv_events=ipc://{folder}/e,kv_events_replay=ipc://{folder}/r"
    )


def test_instances_with_events_are_followed_while_they_are_listed(tmp_path: Path) -> None:
    """One of them changes its address, and one is listed without events."""

    async def test() -> None:
        registry = CollectorRegistry()
        followers = KvEventFollowers(registry, hash_seed=SEED, insecure=False)
        one = listed("one", tmp_path)
        with emulated(tmp_path, CONFIG, kv_events_config=json.dumps(endpoints(tmp_path)), **SMALL) as engine:
            await work(engine, random.Random(1), 3)
            followers.update([one, replace(one, instance_id="two", kv_events="", kv_events_replay="")])
            assert list(followers.streams) == ["one"]
            stream = followers.streams["one"]
            await until(
                lambda: stream.certainty == COMPLETE and stream.index.num_blocks == sum(cached(engine).values())
            )
            assert 'block_kv_cached_blocks{instance="one",medium="GPU"}' in generate_latest(registry).decode()
            followers.update([one])
            assert followers.streams["one"] is stream
            followers.update([replace(one, kv_events_replay="")])
            assert followers.streams["one"] is not stream
            followers.update([])
            assert followers.streams == {}
            await followers.close()

    run(test())


def test_events_in_plain_text_from_other_machines_need_a_flag(caplog: pytest.LogCaptureFixture) -> None:
    """They contain prompts; without it the hits of this instance are estimated."""
    instance = instance_from_flag("one=http://10.0.0.1:1,10.0.0.1:2,kv_events=tcp://10.0.0.1:5557")

    async def test() -> None:
        refused = KvEventFollowers(CollectorRegistry(), hash_seed=SEED, insecure=False)
        refused.update([instance])
        assert refused.streams == {}
        allowed = KvEventFollowers(CollectorRegistry(), hash_seed=SEED, insecure=True)
        allowed.update([instance])
        assert list(allowed.streams) == ["one"]
        await asyncio.sleep(0)
        await allowed.close()
        await refused.close()

    run(test())
    (line,) = [record for record in caplog.records if record.getMessage() == "KV events are not followed"]
    assert "kv_events: tcp://10.0.0.1:5557 is on another machine" in str(line.fields["reason"])
    assert "--kv-events-insecure" in str(line.fields["reason"])


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("kv_events=tcp://h", "kv_events: 'tcp://h' must be ipc://PATH or tcp://HOST:PORT"),
        ("kv_events=tcp://*:5557", "kv_events: 'tcp://*:5557' must be"),
        ("kv_events_replay=tcp://h:1", "kv_events_replay: goes with kv_events only"),
    ],
)
def test_a_wrong_address_is_one_line(flag: str, wrong: str) -> None:
    """Which names the field."""
    with pytest.raises(ValueError, match="^instance: ") as caught:
        instance_from_flag(f"one=http://h:1,h:2,{flag}")
    assert wrong in str(caught.value)
