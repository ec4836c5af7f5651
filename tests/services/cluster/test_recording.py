"""Live traffic: policies are switched, decisions explained, recorded and replayed by other policies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from protos.block.v1 import common_pb2
from services.cluster import Cluster, ClusterSettings, running
from services.decision_recordings import decisions_in, requests_in
from tests.services.cli.running import answer, block
from tests.services.cluster.living import MODEL
from tests.services.cluster.loading import loaded
from tests.services.waiting import PATIENCE_S, run, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]  # one at a time: each starts a dozen processes

ENGINES = ("engine-0", "engine-1")
TABLES = """
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
max-num-seqs = 8
max-model-len = 512
num-gpu-blocks = 200
[scheduler]
sidecar-deadline-ms = 20000
tagger-deadline-ms = 20000
[gateway]
schedule-s = 60.0
connect-s = 60.0
"""
POLICIES = ("lmetric", "block: k = 1", "expr: num_queued + num_running", "block")
EACH = 6  # requests by each policy, at least
OUTPUT_TOKENS = 12
WHY = {"model": MODEL, "prompt": "Why here?", "max_tokens": 3, "ignore_eos": True}


async def switched_under_load(cluster: Cluster) -> int:
    """Switch from policy to policy under load; return the number of requests, none of which failed."""
    scheduler = cluster.scheduler_addresses["block"][0]
    async with loaded(cluster.gateway_urls["block"], clients=4, output_tokens=OUTPUT_TOKENS) as load:
        for policy in POLICIES:
            start = len(load.results)
            done = await asyncio.to_thread(block, "policies", "use", policy, "--scheduler", scheduler)
            assert (done.returncode, done.stderr) == (0, "")
            assert f"{scheduler}: {policy} (before: " in done.stdout
            await until(lambda start=start: load.served_since(start) >= EACH)  # type: ignore[misc]
    assert load.failures() == []
    return load.num_sent


async def explained(cluster: Cluster) -> None:
    """An explanation, by the request's header and by the command, lists both engines."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        headers = {"x-request-id": "why", "x-block-explain": "true"}
        url = f"{cluster.gateway_urls['block']}/v1/completions"
        response = await client.post(url, json=WHY, headers=headers)
    explanation = json.loads(response.headers["x-block-explanation"])
    assert explanation["policy"] == "block"
    assert sorted(one["instance"] for one in explanation["candidates"]) == list(ENGINES)
    assert explanation["candidates"][0]["instance"] == response.headers["x-block-instance"]
    scheduler = cluster.scheduler_addresses["block"][0]
    afterwards = await asyncio.to_thread(answer, "explain", "why", "--scheduler", scheduler)
    assert sorted(one["instance_id"] for one in afterwards["candidates"]) == list(ENGINES)
    assert explanation["why"] == afterwards["why"]


def test_what_was_recorded_live_is_replayed_by_other_policies(tmp_path: Path) -> None:
    """The recording has all requests with their lengths and decisions, and every policy serves them all."""
    tables, record = tmp_path / "cluster.toml", str(tmp_path / "decisions.jsonl")
    tables.write_text(TABLES)
    settings = ClusterSettings(
        instances=2, port=0, tables_file=str(tables), scheduler_flags=("--record", record, "--record-candidates")
    )
    num_requests = 0

    async def test() -> None:
        nonlocal num_requests
        async with running(settings) as cluster:
            num_requests = await switched_under_load(cluster)
            await explained(cluster)

    run(test, limit_s=6 * PATIENCE_S)
    requests = requests_in(record)
    assert len(requests) == num_requests + 1
    assert sorted(one.output_tokens or 0 for one in requests) == [3, *[OUTPUT_TOKENS] * num_requests]
    assert [one.arrival_s for one in requests] == sorted(one.arrival_s for one in requests)
    decisions = list(decisions_in(record))
    assert {one.policy for one in decisions} == {*POLICIES}
    assert all(sorted(seen.instance_id for seen in one.candidates) == list(ENGINES) for one in decisions)
    shortlisted = [one for one in decisions if one.policy == "block: k = 1"]
    assert all(NOT_SHORTLISTED in {seen.fate for seen in one.candidates} for one in shortlisted)
    assert "engine-1" in block("explain", "why", "--record", record).stdout

    replayed = answer(
        "simulate", "--replay", record, "--policy", "block,jsq,round_robin", "--instances", "2",
        "--profile", "llama-2-7b-a30", "--max-num-seqs", "8", "--max-model-len", "512", "--num-gpu-blocks", "200",
    )  # fmt: skip
    assert [one["policy"] for one in replayed["policies"]] == ["block", "jsq", "round_robin"]
    num_tokens = OUTPUT_TOKENS * num_requests + 3
    for one in replayed["policies"]:
        assert (one["num_requests"], one["num_finished"]) == (num_requests + 1, num_requests + 1)
        assert one["output_tokens_per_s"] * one["span_s"] == pytest.approx(num_tokens)
        assert 0.1 < one["e2e_s"]["mean"] < 3.0  # twelve steps of some 30 ms, without queueing


NOT_SHORTLISTED = common_pb2.CANDIDATE_FATE_NOT_SHORTLISTED
