"""Compares the plug-in's state file with the state of vLLM's real schedulers at every step."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from predictor import profile_check
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.profile import load_profile
from predictor.snapshot import LiveRequest
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, snapshot_from_view
from services.predictor_server.exported import ExportedEngine
from tests.conformance.ours import our_config
from tests.conformance.vllm_side import interpreter
from tests.conformance.workloads import workload

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("vllm_steps.py")
DEFAULT_RUNS = 24


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has vLLM, with the plug-in writing into a file of this test."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [interpreter(), "-I", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "BLOCK_STATE_FILE": str(tmp_path / "state")},
        )
    yield process
    process.kill()
    process.communicate()


def test_the_file_has_the_state_of_the_scheduler(
    scheduler: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, queues, steps in flight and contents of blocks are equal: sync and async, fcfs and priority."""
    monkeypatch.setattr(profile_check, "FAR_OFF", math.inf)  # steps without a model do not have the times of a profile
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("BLOCK_EXPORT_RUNS", DEFAULT_RUNS))):
        load = workload(seed)
        send(scheduler, json.dumps(load))
        reader = Reader(str(tmp_path / "state"))
        sidecar = ExportedEngine(str(tmp_path / "state"), load_profile("constant"), DEFAULT_RESIDUAL, 60.0)
        caching = load["engine"]["enable_prefix_caching"]
        while (truth := json.loads(scheduler.stdout.readline() or "null")) != "end":
            assert truth is not None, (tmp_path / "log").read_text()[-3000:]
            view = reader.read(contents=True)
            assert config_of(view) == our_config(load)
            snapshot = snapshot_from_view(view)
            where = f"seed {seed}, publication {view.sequence}"
            assert [exported(one) for one in snapshot.running] == [held(one, caching) for one in truth["running"]], (
                where
            )
            assert [exported(one) for one in snapshot.waiting] == [
                held(one, caching) | {"blocks": [] if caching else one["blocks"]} for one in truth["waiting"]
            ], where
            steps = [{"scheduled": step.scheduled, "sampled": list(step.sampled)} for step in snapshot.steps]
            assert steps == truth["steps"], where
            assert snapshot.num_free_blocks == len(truth["free"]), where
            if caching:
                assert list(snapshot.kv_cache.free_block_ids) == truth["free"], where
                assert {str(k): v for k, v in snapshot.kv_cache.contents.items()} == truth["contents"], where
            picture = sidecar.refresh()  # understood as a whole, or it would refuse to forecast
            assert picture.engine.tracks_blocks == caching, where
            seen["async"] += load["engine"]["async_scheduling"]
            seen["two in flight"] += len(steps) == 2
            seen["preempted"] += any(one["preemptions"] for one in truth["waiting"])
            seen["cached"] += bool(truth["contents"])
            seen["waiting"] += bool(truth["waiting"])
            send(scheduler, "on")
        reader.close()
        sidecar.close()
        assert not (tmp_path / "state").exists()
    assert all(seen[what] for what in ("async", "two in flight", "preempted", "cached", "waiting")), seen


def send(process: subprocess.Popen[str], line: str) -> None:
    """Send a line."""
    process.stdin.write(line + "\n")
    process.stdin.flush()


def exported(live: LiveRequest) -> dict[str, Any]:
    """Return a request as the file has it."""
    return {
        "id": live.request.request_id,
        "prompt": live.request.prompt_tokens,
        "output": live.produced_tokens,
        "computed": live.computed_tokens,
        "placeholders": live.placeholders,
        "in_flight": live.in_flight_tokens,
        "stale": live.stale_tokens,
        "preemptions": live.num_preemptions,
        "priority": live.request.priority,
        "blocks": list(live.block_ids),
        "hashes": list(live.request.prefix_hashes),
        "num_blocks": live.num_blocks,
    }


def held(request: dict[str, Any], caching: bool) -> dict[str, Any]:
    """Return a request as the scheduler has it; without a prefix cache the file does not have its blocks."""
    blocks = request["blocks"]
    return {
        **request,
        "num_blocks": len(blocks),
        "blocks": blocks if caching else [],
        "hashes": request["hashes"] if caching else [],
    }
