"""Compares legs in the engine model with the schedulers of the installed vLLM and a KV connector, over random workloads."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest

from tests.conformance.compare import first_difference
from tests.conformance.leg_workloads import LegReplay, leg_workload
from tests.conformance.vllm_side import interpreter, leg_traces, version

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 300
# Events of the traces that a default run must have in five workloads or more.
EVENTS = (
    "aborted_while_fetching", "aborted_while_waiting", "admission_stops", "budget_cuts", "evictions", "failed_partly",
    "failed_wholly", "fetches", "fetches_with_hits", "held", "max_num_seqs_stops", "preempted_with_output_in_flight",
    "preemptions", "resumed_with_hits", "threshold_cuts", "waited_for_transfers", "watermark_stops",
)  # fmt: skip

Traced = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Return workloads with vLLM's traces."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    num_runs = int(os.environ.get("BLOCK_CONFORMANCE_RUNS", DEFAULT_RUNS))
    workloads = [leg_workload(seed, version()) for seed in range(num_runs)]
    return list(zip(workloads, map(json.loads, leg_traces(workloads)), strict=True))


def test_the_engine_model_serves_legs_as_vllm_does(traced: Traced) -> None:
    """Scheduled tokens in order, queues, preemptions and free blocks are equal at every step."""
    differences = [first_difference(load, trace["steps"], LegReplay(load).steps()) for load, trace in traced]
    found = [difference for difference in differences if difference is not None]
    if found:
        pytest.fail(f"{len(found)} of {len(traced)} workloads differ; the first:\n{found[0]}", pytrace=False)


def test_the_workloads_reach_every_rule(traced: Traced) -> None:
    """Transfers that fail, shortage, preemption and aborts occur, with all roles and both schedulers."""
    reached: Counter[str] = Counter()
    modes: Counter[tuple[str, bool, str, str]] = Counter()
    for load, trace in traced:
        reached.update(trace["coverage"].keys())
        engine = load["engine"]
        modes[
            engine["kv_role"],
            engine["async_scheduling"],
            engine["scheduling_policy"],
            engine["kv_load_failure_policy"],
        ] += 1
    if len(traced) >= DEFAULT_RUNS:
        assert {event: reached[event] for event in EVENTS if reached[event] < 5} == {}
        assert len(modes) == 3 * 2 * 2 * 2
