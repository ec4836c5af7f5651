"""Compares the engine model with the real scheduler classes of the installed vLLM, over random workloads, at every step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.conformance.compare import first_difference
from tests.conformance.ours import our_steps
from tests.conformance.vllm_side import interpreter, traces, version
from tests.conformance.workloads import workload
from tests.oracle import vllm_v1

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 500
# The events that vllm_trace.py counts and that a default run must have. `stale_skips`, a waiting request skipped because
# its output from before a preemption is in flight, cannot occur with two steps in flight.
RULES = (
    "admission_stops", "budget_cuts", "cached_on_update", "empty_steps", "ended_by_eos", "ended_by_model_len",
    "evictions", "finished_while_preempted", "max_num_seqs_stops", "preempted_after_scheduled", "preempted_itself",
    "preempted_with_output_in_flight", "prefix_hits", "prefix_hits_on_held_blocks", "refunds_spent",
    "reserve_full_isl_stops", "resumed_after_output", "resumed_with_hits", "running_left_out", "threshold_cuts",
    "unchunked_stops", "wasted_slots", "watermark_stops", "watermark_waivers",
)  # fmt: skip

Traced = list[tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Return workloads with vLLM's traces."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    num_runs = int(os.environ.get("BLOCK_CONFORMANCE_RUNS", DEFAULT_RUNS))
    workloads = [workload(seed, version()) for seed in range(num_runs)]
    return list(zip(workloads, traces(workloads), strict=True))


def test_the_engine_model_makes_the_decisions_of_vllm(traced: Traced) -> None:
    """Scheduled tokens in order, queues, preemptions and free blocks are equal at every step."""
    expect_no_difference(traced, our_steps)


def test_the_oracle_makes_the_decisions_of_vllm(traced: Traced) -> None:
    """This justifies the use of the plain model in other tests."""
    expect_no_difference(
        traced, lambda load: list(islice(vllm_v1.replay_steps(load["engine"], load["requests"]), load["max_steps"]))
    )


def test_the_workloads_reach_every_rule(traced: Traced) -> None:
    """A default run makes vLLM use each rule in five workloads or more, and never leaves it stuck."""
    reached: Counter[str] = Counter()
    for _, trace in traced:
        reached.update(json.loads(trace)["coverage"].keys())
    assert reached["stuck"] == 0
    if len(traced) >= DEFAULT_RUNS:
        assert {rule: reached[rule] for rule in RULES if reached[rule] < 5} == {}


def expect_no_difference(traced: Traced, replay: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Fail with the first difference, and with the number of workloads that have one."""
    differences = []
    for load, trace in traced:
        difference = first_difference(load, json.loads(trace)["steps"], replay(load))
        if difference is not None:
            differences.append(difference)
    if differences:
        summary = f"{len(differences)} of {len(traced)} workloads differ; the first:"
        pytest.fail(f"{summary}\n{differences[0]}", pytrace=False)
