"""Compares ranks in lockstep with vLLM 0.32's real engine cores of data-parallel ranks, at every step of every rank."""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random
from typing import Any

import pytest

from predictor.data_parallel import LockstepRules
from predictor.engine import Engine
from predictor.lockstep import LockstepGroup, last_step
from predictor.step_time import StepTime
from tests.conformance.ours import our_config, our_requests
from tests.conformance.vllm_side import interpreter, lockstep_traces
from tests.conformance.workloads import workload

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 200
SECONDS = {"constant_s": 0.5, "token_s": 1 / 64}  # sums of these are exact
LONG_AFTER_S = 1e6


def lockstep_workload(seed: int) -> dict[str, Any]:
    """Draw an engine, its ranks, and requests that leave some ranks idle at times."""
    rng = Random(1000 + seed)
    load = workload(seed)
    load["engine"]["scheduling_policy"] = "fcfs"
    ranks = rng.choice((2, 2, 3, 4))
    stretch = rng.choice((0.25, 1.0, 4.0, 16.0))
    favourite = rng.randrange(ranks)
    for request in load["requests"]:
        request["arrival_s"] = round(request["arrival_s"] * stretch * 64) / 64
        request["priority"] = 0
        request["rank"] = favourite if rng.random() < 0.3 else rng.randrange(ranks)
    return {**load, "ranks": ranks, "sync_interval": rng.choice((1, 2, 5, 16, 16, 32)), "seconds": SECONDS}


def our_passes(load: dict[str, Any]) -> dict[str, Any]:
    """Simulate a workload."""
    step_time = StepTime(constant_s=SECONDS["constant_s"], token_s=SECONDS["token_s"], empty_s=SECONDS["constant_s"])
    engines = [Engine(our_config(load), step_time) for _ in range(load["ranks"])]
    rank_of = [spec.pop("rank") for spec in load["requests"]]
    for rank, request in zip(rank_of, our_requests(load), strict=True):
        engines[rank].add(request)
    group = LockstepGroup(engines, LockstepRules(sync_interval=load["sync_interval"]))
    iterations: list[list[dict[str, Any]]] = [[] for _ in engines]
    ends_s = []
    while (planned := group.next_pass(LONG_AFTER_S)) is not None:
        ends_s.append(planned.end_s)
        for engine, is_busy, rows in zip(engines, planned.busy, iterations, strict=True):
            scheduled = None
            if is_busy:
                head = engine.state.engine[0]
                step = last_step(engine.state)
                entries = engine.state.batch[(head.oldest + head.num_in_flight - 1) % 2, : step.num_scheduled]
                scheduled = {engine.id_of(entry.slot): int(entry.tokens) for entry in entries}
            rows.append(
                {
                    "wave": planned.wave,
                    "counter": planned.number,
                    "scheduled": scheduled,
                    "running": engine.running(),
                    "waiting": len(engine.waiting()),
                    "free_blocks": int(engine.state.engine[0].num_free_blocks),
                }
            )
    return {"iterations": iterations, "ends_s": ends_s}


def difference(load: dict[str, Any], theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Describe the first difference."""
    for rank, (expected, found) in enumerate(zip(theirs["iterations"], ours["iterations"], strict=True)):
        for number, (a, b) in enumerate(zip(expected, found, strict=False)):
            # a rank without a batch may plan its dummy batch later than its empty step, which it shows here
            fields = b.keys() if a["scheduled"] is not None or b["scheduled"] is not None else ("wave", "counter")
            unequal = {name: (a[name], b[name]) for name in fields if a[name] != b[name]}
            if unequal:
                return f"seed {load['seed']}, rank {rank}, pass {number}: vLLM's and ours: {unequal}"
        if len(expected) != len(found):
            return f"seed {load['seed']}, rank {rank}: vLLM has {len(expected)} passes, we have {len(found)}"
    if theirs["ends_s"] != ours["ends_s"]:
        return f"seed {load['seed']}: passes end at other times"
    return None


@pytest.fixture(scope="module")
def traced() -> list[tuple[dict[str, Any], str]]:
    """Return workloads with vLLM's traces."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    loads = [lockstep_workload(seed) for seed in range(int(os.environ.get("BLOCK_LOCKSTEP_RUNS", DEFAULT_RUNS)))]
    return list(zip(loads, lockstep_traces(loads), strict=True))


def test_ranks_step_as_those_of_vllm(traced: list[tuple[dict[str, Any], str]]) -> None:
    """Batches, dummy batches, waves, queues, blocks and times are equal in every pass of every rank."""
    reached: Counter[str] = Counter()
    differences = []
    for load, trace in traced:
        theirs = json.loads(trace)
        reached.update(theirs["coverage"])
        found = difference(load, theirs, our_passes(load))
        if found is not None:
            differences.append(found)
    if differences:
        pytest.fail(
            f"{len(differences)} of {len(traced)} workloads differ; the first:\n{differences[0]}", pytrace=False
        )
    if len(traced) >= DEFAULT_RUNS:
        assert min(reached["dummy"], reached["steps"]) > 1000
        assert reached["waves"] > 2 * len(traced)
        assert reached["started_by_rank"] > 5
