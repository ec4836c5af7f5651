"""Compares the engine model with vLLM's scheduler classes with speculative decoding, at every step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from predictor.speculation import METHODS
from tests.conformance import drafts
from tests.conformance.compare import first_difference
from tests.conformance.spec_workloads import our_steps, spec_workload
from tests.conformance.vllm_side import interpreter, spec_traces, version
from tests.oracle import vllm_v1

pytestmark = pytest.mark.vllm

RUNS_PER_METHOD = 100
# The events that spec_trace.py counts and that a default run must have.
RULES = (
    "accepted_all", "accepted_some", "rejected_all", "draft_budget_cuts", "model_len_cuts", "preempted_with_drafts",
    "stale_drafts", "filled_up", "ended_within_accepted", "prefill_lookahead_cuts", "prefix_hits", "resumed_with_hits",
)  # fmt: skip

Traced = list[tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Return workloads with vLLM's traces."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    runs = int(os.environ.get("BLOCK_SPECULATION_RUNS", RUNS_PER_METHOD))
    workloads = [spec_workload(seed, method, version()) for method in METHODS for seed in range(runs)]
    return list(zip(workloads, spec_traces(workloads), strict=True))


def test_the_engine_model_makes_the_decisions_of_vllm(traced: Traced) -> None:
    """Scheduled tokens, draft tokens, order, queues, preemptions and free blocks are equal at every step."""
    expect_no_difference(traced, our_steps)


def test_the_oracle_makes_the_decisions_of_vllm(traced: Traced) -> None:
    """This justifies the use of the plain model in other tests."""
    expect_no_difference(traced, lambda load: list(oracle_steps(load)))


def test_the_workloads_reach_every_rule(traced: Traced) -> None:
    """A default run makes vLLM use each rule in five workloads or more."""
    reached: Counter[str] = Counter()
    for _, trace in traced:
        reached.update(json.loads(trace)["coverage"].keys())
    if len(traced) >= len(METHODS) * RUNS_PER_METHOD:
        assert {rule: reached[rule] for rule in RULES if reached[rule] < 5} == {}


class DrawnEngine(vllm_v1.Engine):
    """The oracle with the drawn numbers of proposed and accepted draft tokens."""

    def __init__(self, load: dict[str, Any]) -> None:
        super().__init__(load["engine"])
        self.load = load

    def accepted(self, request: vllm_v1.Request, draft: vllm_v1.Draft) -> int:
        """Return the drawn number."""
        return 0 if draft.padded else min(draft.tokens, drafts.accepted(self.load, request.id, draft.number))

    def proposed(self, request: vllm_v1.Request, draft: vllm_v1.Draft) -> int:
        """Return the drawn number."""
        return drafts.proposed(self.load, request.id, draft.number)


def oracle_steps(load: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replay a workload on the oracle."""
    engine = DrawnEngine(load)
    requests = (vllm_v1.Request(**spec) for spec in load["requests"])
    return islice(vllm_v1.run(engine, requests, vllm_v1.one_second), load["max_steps"])


def expect_no_difference(traced: Traced, replay: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Fail with the first difference, and with the number of workloads that have one."""
    differences = []
    for load, trace in traced:
        difference = first_difference(load, json.loads(trace)["steps"], replay(load))
        if difference is not None:
            differences.append(f"{load['engine']['speculative_method']}, {difference}")
    if differences:
        summary = f"{len(differences)} of {len(traced)} workloads differ; the first:"
        pytest.fail(f"{summary}\n{differences[0]}", pytrace=False)
