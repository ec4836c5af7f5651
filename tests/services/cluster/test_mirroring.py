"""A cluster whose engines export nothing: all requests pass the sidecars' proxies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from services.cluster import Cluster, ClusterSettings, running
from services.cluster.settings import settings_from_file
from tests.services.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

PATIENCE_S = 60.0
TABLES = """
[cluster]
instances = 2
port = 0
mirror = true
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
speed = 20.0
[predictor]
profile = "llama-2-7b-a30"
engine-speed = 20.0
max-num-seqs = 8
[scheduler]
poll-s = 0.1
sidecar-deadline-ms = 20000
[gateway]
schedule-s = 60.0
connect-s = 60.0
"""
ASK = {"model": "tiny", "prompt": "Tell me a story", "max_tokens": 20, "ignore_eos": True, "stream": True}


async def completed(client: httpx.AsyncClient, url: str) -> httpx.Headers:
    """Complete a stream through the gateway, on any instance."""
    answer = await client.post(f"{url}/v1/completions", json=ASK)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") == ASK["max_tokens"] + 1
    return answer.headers


def test_requests_are_placed_by_forecasts_of_mirrored_engines(tmp_path: Path) -> None:
    """The list of instances has the proxies' addresses; a restarted sidecar keeps the address of its proxy."""
    path = tmp_path / "cluster.toml"
    path.write_text(TABLES)

    async def test() -> None:
        settings = ClusterSettings(**settings_from_file(str(path)), tables_file=str(path))
        async with running(settings) as cluster, httpx.AsyncClient(timeout=PATIENCE_S) as client:
            (url,) = cluster.gateway_urls.values()
            listed = json.loads(cluster.instances_file.read_text())["instances"]
            proxies = [f"http://127.0.0.1:{cluster.children[f'predictor-{number}'].proxy_port}" for number in range(2)]
            assert [one["engine_url"] for one in listed] == proxies
            headers = [await completed(client, url) for _ in range(6)]
            assert all(float(one["x-block-predicted-e2e-ms"]) > 0 for one in headers)
            await killed_and_back(cluster, client)
            await asyncio.gather(*(completed(client, url) for _ in range(6)))

    async def killed_and_back(cluster: Cluster, client: httpx.AsyncClient) -> None:
        child = cluster.children["predictor-0"]
        before = child.proxy_port
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: bool(child.num_restarts and child.serves))
        assert child.proxy_port == before
        assert (await client.get(f"http://127.0.0.1:{before}/version")).status_code == 200

    asyncio.run(test())


def test_what_is_no_choice_is_refused() -> None:
    """The field is a switch."""
    with pytest.raises(ValueError, match="^mirror: "):
        ClusterSettings(mirror="yes")  # type: ignore[arg-type]
