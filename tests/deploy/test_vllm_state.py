"""Compares the plug-in's state file with the state of vLLM's real schedulers at every step."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor import profile_check
from predictor.lengths import DEFAULT_RESIDUAL
from predictor.profile import load_profile
from predictor.snapshot import LiveRequest
from predictor.vllm_versions import release_of
from services.engine_state import layout
from services.engine_state.reader import Reader
from services.engine_state.snapshot import config_of, snapshot_from_view
from services.engine_state.view import View
from services.predictor_server.exported import ExportedEngine
from tests.conformance.leg_workloads import leg_workload
from tests.conformance.ours import our_config
from tests.conformance.spec_workloads import spec_workload
from tests.conformance.vllm_side import interpreter, version
from tests.conformance.workloads import workload

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("vllm_steps.py")
DEFAULT_RUNS = 24
STAGES = {
    layout.NO_TRANSFER: "", layout.TO_FETCH: "to_fetch", layout.FETCHING: "fetching", layout.FETCHED: "fetched",
    layout.FETCH_FAILED: "failed", layout.BLOCKS_HELD: "held",
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (workload, ("async", "two in flight", "preempted", "cached", "waiting")),
        (spec_workload, ("async", "two in flight", "preempted", "cached", "waiting", "drafts in flight", "drafts")),
        (leg_workload, ("async", "to_fetch", "fetching", "failed", "held", "aborted while fetching")),
    ],
)
def test_the_file_has_the_state_of_the_scheduler(
    scheduler: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draw: Callable[[int, str], dict[str, Any]],
    expected: tuple[str, ...],
) -> None:
    """Requests, queues, steps in flight, contents of blocks and transfers are equal: sync and async, fcfs and priority."""
    monkeypatch.setattr(profile_check, "FAR_OFF", math.inf)  # steps without a model do not have the times of a profile
    seen: Counter[str] = Counter()
    for seed in range(int(os.environ.get("BLOCK_EXPORT_RUNS", DEFAULT_RUNS))):
        load = draw(seed, version())
        send(scheduler, json.dumps(load))
        reader = Reader(str(tmp_path / "state"))
        sidecar = ExportedEngine(str(tmp_path / "state"), load_profile("constant"), DEFAULT_RESIDUAL, 60.0)
        caching = load["engine"]["enable_prefix_caching"]
        while (truth := json.loads(scheduler.stdout.readline() or "null")) != "end":
            assert truth is not None, (tmp_path / "log").read_text()[-3000:]
            view = reader.read(contents=True)
            assert replace(config_of(view), kv_bytes_per_token=0) == our_config(load)
            snapshot = snapshot_from_view(view)
            where = f"seed {seed}, publication {view.sequence}"
            assert [exported(one) for one in snapshot.running] == [held(one, caching) for one in truth["running"]], (
                where
            )
            assert [exported(one) for one in snapshot.waiting] == [held(one, caching) for one in truth["waiting"]], (
                where
            )
            steps = [
                {"scheduled": step.scheduled, "sampled": list(step.sampled), "drafts": step.drafts}
                for step in snapshot.steps
            ]
            assert steps == truth["steps"], where
            assert snapshot.num_free_blocks == len(truth["free"]), where
            if caching:
                assert list(snapshot.kv_cache.free_block_ids) == truth["free"], where
                assert {str(k): v for k, v in snapshot.kv_cache.contents.items()} == truth["contents"], where
            everything = (*truth["running"], *truth["waiting"], *truth["ended"])
            assert stages(view) == {one["id"]: one["stage"] for one in everything}, where
            assert blocks_of_ended(view) == {
                one["id"]: one["blocks"] if caching else len(one["blocks"]) for one in truth["ended"]
            }
            picture = sidecar.refresh()  # understood as a whole, or it would refuse to forecast
            assert picture.engine.tracks_blocks == caching, where
            seen["async"] += load["engine"]["async_scheduling"]
            seen["two in flight"] += len(steps) == 2
            seen["drafts in flight"] += any(step["drafts"] for step in steps)
            seen["drafts"] += any(one["drafts"] for one in truth["running"])
            seen["preempted"] += any(one["preemptions"] for one in truth["waiting"])
            seen["cached"] += bool(truth["contents"])
            seen["waiting"] += bool(truth["waiting"])
            seen.update(one["stage"] for one in everything)
            seen["aborted while fetching"] += any(one["stage"] == "fetching" for one in truth["ended"])
            send(scheduler, "on")
        reader.close()
        sidecar.close()
        assert not (tmp_path / "state").exists()
    assert all(seen[what] for what in expected), seen


@pytest.mark.parametrize(("draw", "connector"), [(workload, ""), (leg_workload, "StandIn")])
def test_the_file_names_what_is_not_modelled(
    scheduler: subprocess.Popen[str], tmp_path: Path, draw: Callable[[int, str], dict[str, Any]], connector: str
) -> None:
    """Prefills that are held back, which without data parallelism 0.33 does first, and other connectors than NIXL."""
    load = draw(1, version())
    load["engine"]["prefill_schedule_interval"] = 4
    send(scheduler, json.dumps(load))
    assert json.loads(scheduler.stdout.readline())
    reader = Reader(str(tmp_path / "state"))
    named = reader.read().settings.get("not_modelled", [])
    reader.close()
    holds_back = release_of(version()) >= (0, 33)
    assert named == holds_back * ["prefill_schedule_interval 4"] + bool(connector) * [f"kv_connector {connector}"]


def stages(view: View) -> dict[str, str]:
    """Return where the transfer of each request's blocks stands."""
    names = view.requests["request_id"][view.slots]
    numbers = view.live["stage"][view.slots]
    return {name.decode(): STAGES[number] for name, number in zip(names.tolist(), numbers.tolist(), strict=True)}


def blocks_of_ended(view: View) -> dict[str, Any]:
    """Return the blocks of requests that have ended, or their number where blocks are not exported."""
    names = [name.decode() for name in view.requests["request_id"][view.held].tolist()]
    if view.contents is None:
        return dict(zip(names, view.live["num_blocks"][view.held].tolist(), strict=True))
    first = len(view.running) + len(view.waiting)
    return {name: table.tolist() for name, table in zip(names, view.contents.tables[first:], strict=True)}


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
        "drafts": live.draft_tokens,
        "leg": live.request.leg,
        "blocks": list(live.block_ids),
        "hashes": list(live.request.prefix_hashes),
        "num_blocks": live.num_blocks,
    }


def held(request: dict[str, Any], caching: bool) -> dict[str, Any]:
    """Return a request as the scheduler has it; without a prefix cache the file does not have its blocks."""
    blocks = request["blocks"]
    shown = {name: value for name, value in request.items() if name != "stage"}
    return {
        **shown,
        "num_blocks": len(blocks),
        "blocks": blocks if caching else [],
        "hashes": request["hashes"] if caching else [],
    }
