"""Requests with two legs while engines of either pool are killed: processes of a whole cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from services.cluster import ClusterSettings, running
from tests.services.cluster.living import Living
from tests.services.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

POLICY = "pd_least"  # which always disaggregates
NUM = 8  # requests at once
TABLES = """
[engine]
speed = 4.0
served-model-name = "tiny"
max-num-seqs = 8
max-model-len = 1024
[predictor]
metrics-port = 0
[scheduler]
sidecar-deadline-ms = 5000
[gateway]
schedule-s = 60.0
connect-s = 10.0
"""


async def serve(client: httpx.AsyncClient, url: str, name: str) -> None:
    """Send requests with two legs at once; each has to be served."""
    replies = await asyncio.gather(
        *(
            client.post(
                f"{url}/v1/completions",
                json={"model": "tiny", "prompt": f"{name} {number} " * 40, "max_tokens": 6, "ignore_eos": True},
            )
            for number in range(NUM)
        )
    )
    assert [reply.status_code for reply in replies] == [200] * NUM, [reply.text for reply in replies]
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [6] * NUM


async def num_held(live: Living) -> float:
    """Return the number of prefill legs whose blocks were held."""
    return await live.metric(f"gateway-{POLICY}", "block_gateway_prefill_legs_total", result="held")


def test_engines_of_either_pool_are_killed(tmp_path: Path) -> None:
    """Every request is served, and nothing stays reserved."""
    tables = tmp_path / "cluster.toml"
    tables.write_text(TABLES)
    settings = ClusterSettings(prefill=2, decode=2, port=0, policies=(POLICY,), tables_file=str(tables))

    async def test(runner: asyncio.Runner) -> None:
        async with running(settings) as cluster, httpx.AsyncClient(timeout=4 * PATIENCE_S) as client:
            live = Living(cluster=cluster, runner=runner, client=client)
            url = cluster.gateway_urls[POLICY]
            await serve(client, url, "first")
            assert await num_held(live) > 0
            for victim in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                answers = asyncio.create_task(serve(client, url, victim))
                before = await num_held(live)

                async def is_under_way(before: float = before, answers: asyncio.Task[None] = answers) -> bool:
                    return answers.done() or await num_held(live) > before

                await until(is_under_way)
                is_back = await live.kill(victim)
                await answers
                await until(is_back)
            sidecars = [name for name in cluster.children if name.startswith("predictor")]

            async def is_at_rest() -> bool:
                return not any([await live.metric(name, "block_reservations") for name in sidecars])

            await until(is_at_rest)

    with asyncio.Runner() as runner:
        runner.run(test(runner))
