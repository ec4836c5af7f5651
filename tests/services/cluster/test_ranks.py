"""A cluster with an engine that serves four data-parallel ranks at one URL: every rank is an instance."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cluster import Cluster, ClusterSettings, running
from tests.services.cli.running import refusal
from tests.services.cluster.living import ENGINE_TABLE, metric_of
from tests.services.waiting import PATIENCE_S, until

RANKS = 4
NAMES = [f"engine-0-rank-{rank}" for rank in range(RANKS)]
TABLES = f"""
{ENGINE_TABLE}[predictor]
metrics-port = 0
[tagger]
metrics-port = 0
[gateway]
poll-s = 0.1
sidecar-deadline-ms = 5000
tagger-deadline-ms = 5000
reservation-s = 30
attempts = 2
"""


async def complete(client: httpx.AsyncClient, cluster: Cluster, number: int) -> httpx.Response:
    """Send a request to the gateway, every other one as a stream."""
    url = next(iter(cluster.gateway_urls.values()))
    body = {
        "model": "tiny", "prompt": f"question number {number} " * (1 + number % 9), "max_tokens": 10 + number % 30,
        "ignore_eos": True, "stream": bool(number % 2),
    }  # fmt: skip
    return await client.post(f"{url}/v1/completions", json=body)


async def served_by_rank(client: httpx.AsyncClient, cluster: Cluster) -> dict[str, int]:
    """Return how many requests each rank has served, as the engine counts them."""
    engine = cluster.children["engine-0"]
    counts = [
        await metric_of(client, engine, "vllm:e2e_request_latency_seconds_count", engine=str(rank))
        for rank in range(RANKS)
    ]
    return {name: int(count) for name, count in zip(NAMES, counts, strict=True)}


def at_rest(client: httpx.AsyncClient, cluster: Cluster) -> Any:
    """Return the condition that nothing is reserved or under way."""

    async def is_at_rest() -> bool:
        engine, sidecar = cluster.children["engine-0"], cluster.children["predictor-0"]
        values = [
            await metric_of(client, sidecar, "block_reservations"),
            *[await metric_of(client, engine, f"vllm:num_requests_{state}") for state in ("running", "waiting")],
        ]
        return not any(values)

    return is_at_rest


def run_with(tmp_path: Path, test: Any, **settings: Any) -> None:
    """Run a test beside a cluster."""
    file = tmp_path / "cluster.toml"
    file.write_text(TABLES, encoding="utf-8")

    async def limited() -> None:
        cluster_settings = ClusterSettings(instances=1, data_parallel=RANKS, port=0, tables_file=str(file), **settings)
        async with (
            asyncio.timeout(480.0),
            running(cluster_settings) as cluster,
            httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits()) as client,
        ):
            await test(client, cluster)

    asyncio.run(limited())


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
@pytest.mark.parametrize("lockstep", [False, True])
def test_each_request_is_served_by_the_rank_that_was_chosen(tmp_path: Path, *, lockstep: bool) -> None:
    """All ranks are used, nothing stays reserved, and an engine that is killed comes back with all its ranks."""

    async def test(client: httpx.AsyncClient, cluster: Cluster) -> None:
        answers = await asyncio.gather(*(complete(client, cluster, number) for number in range(40)))
        assert {answer.status_code for answer in answers} == {200}
        chosen = Counter(answer.headers["x-block-instance"] for answer in answers)
        assert set(chosen) == set(NAMES)
        await until(at_rest(client, cluster))
        assert await served_by_rank(client, cluster) == dict(chosen)

        engine = cluster.children["engine-0"]
        under_way = [asyncio.create_task(complete(client, cluster, number)) for number in range(12)]
        num_restarts = engine.num_restarts
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.num_restarts > num_restarts and engine.serves)
        await asyncio.gather(*under_way, return_exceptions=True)  # the only engine was down: some may have failed

        async def serves_again() -> bool:
            return (await complete(client, cluster, 0)).status_code == 200

        await until(serves_again)
        await until(at_rest(client, cluster))
        before = await served_by_rank(client, cluster)
        answers = await asyncio.gather(*(complete(client, cluster, number) for number in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        chosen = Counter(answer.headers["x-block-instance"] for answer in answers)
        await until(at_rest(client, cluster))
        after = await served_by_rank(client, cluster)
        assert {name: after[name] - before[name] for name in NAMES} == {name: chosen[name] for name in NAMES}

    run_with(tmp_path, test, lockstep=lockstep)


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_reservations_follow_requests_to_the_rank_that_the_engine_chose(tmp_path: Path) -> None:
    """With the engine's own balancing the request is shown by another rank; its reservation ends there and then."""

    async def test(client: httpx.AsyncClient, cluster: Cluster) -> None:
        answers = await asyncio.gather(*(complete(client, cluster, number) for number in range(40)))
        assert {answer.status_code for answer in answers} == {200}
        await until(at_rest(client, cluster))
        assert sum((await served_by_rank(client, cluster)).values()) == 40

    run_with(tmp_path, test, scheduler_flags=("--data-parallel-balancing", "engine"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-parallel", "0"], "data_parallel: must be a whole number from 1 to 64, not 0"),
        (["--data-parallel", "65"], "data_parallel: must be a whole number from 1 to 64, not 65"),
        (["--data-parallel", "8", "-n", "33"], "data_parallel: 8 ranks of 33 engines are more than 256 instances"),
        (["--lockstep"], "lockstep: needs data_parallel above 1"),
        (["--data-parallel", "2", "--mirror"], "data_parallel: goes without prefill, decode, mirror and provision"),
        (
            ["--data-parallel", "2", "--vllm", "m", "--profile", "llama-2-7b-a30"],
            "data_parallel: is of emulated engines",
        ),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    """The error is one line, and nothing is started."""
    assert message in refusal("up", *flags)
