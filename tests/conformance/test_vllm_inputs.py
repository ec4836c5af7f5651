"""Compares LoRA limits and encoder budgets with vLLM 0.32's real scheduler classes, over random workloads."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from tests.conformance.input_workloads import adapter_workload, image_workload, with_contents
from tests.conformance.ours import our_steps
from tests.conformance.test_vllm_scheduler import Traced, expect_no_difference
from tests.conformance.vllm_side import interpreter, traces
from tests.oracle import vllm_v1

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 200
# What a default run must make vLLM do in five workloads or more.
RULES = {
    "adapters": ("adapter_skips", "admitted_after_adapter_skip", "preemptions", "prefix_hits", "resumed_with_hits"),
    "images": (
        "encoder_budget_stops", "encoder_cache_stops", "encoder_evictions", "encoder_hits", "preemptions",
        "prefix_hits", "resumed_with_hits", "admission_stops",
    ),
}  # fmt: skip
WORKLOADS: dict[str, Callable[[int], dict[str, Any]]] = {"adapters": adapter_workload, "images": image_workload}


@pytest.fixture(scope="module", params=WORKLOADS)
def traced(request: pytest.FixtureRequest) -> tuple[str, Traced]:
    """Return workloads of one kind with vLLM's traces."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    num_runs = int(os.environ.get("BLOCK_CONFORMANCE_RUNS", DEFAULT_RUNS))
    workloads = [WORKLOADS[request.param](seed) for seed in range(num_runs)]
    return request.param, list(zip(workloads, traces(workloads), strict=True))


def test_the_engine_model_makes_the_decisions_of_vllm(traced: tuple[str, Traced]) -> None:
    """Scheduled tokens in order, queues, preemptions and free blocks are equal at every step."""
    expect_no_difference(traced[1], lambda load: our_steps(with_contents(load)))


def test_the_oracle_makes_the_decisions_of_vllm(traced: tuple[str, Traced]) -> None:
    """This justifies the use of the plain model in other tests."""
    expect_no_difference(traced[1], oracle_steps)


def oracle_steps(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay a workload on the plain model."""
    named = with_contents(load)
    return list(islice(vllm_v1.replay_steps(named["engine"], named["requests"]), named["max_steps"]))


def test_the_workloads_reach_every_rule(traced: tuple[str, Traced]) -> None:
    """A default run makes vLLM use each rule in five workloads or more."""
    kind, runs = traced
    reached: Counter[str] = Counter()
    for _, trace in runs:
        reached.update(json.loads(trace)["coverage"].keys())
    if len(runs) >= DEFAULT_RUNS:
        assert {rule: reached[rule] for rule in RULES[kind] if reached[rule] < 5} == {}
