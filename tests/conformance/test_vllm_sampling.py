"""Compares the engine model with vLLM's schedulers on requests with several prompts and responses, at every step."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest

from services.engine_state.identity import parts_of
from tests.conformance.compare import first_difference
from tests.conformance.sampling_workloads import our_requests, our_steps, sampling_workload
from tests.conformance.vllm_side import interpreter, sampling_traces

pytestmark = pytest.mark.vllm

DEFAULT_RUNS = 200
RULES = ("prefix_hits", "prefix_hits_on_held_blocks", "preemptions", "resumed_with_hits", "ended_by_eos", "budget_cuts")


def test_several_prompts_and_responses_are_scheduled_as_vllm_does() -> None:
    """The requests of a group are those of vLLM's ParentRequest: steps, queues, preemptions and blocks are equal."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")
    num_runs = int(os.environ.get("BLOCK_CONFORMANCE_RUNS", DEFAULT_RUNS))
    loads = [sampling_workload(seed) for seed in range(num_runs)]
    reached: Counter[str] = Counter()
    differences = []
    for load, trace in zip(loads, sampling_traces(loads), strict=True):
        theirs = json.loads(trace)
        reached.update(theirs["coverage"].keys())
        if (difference := first_difference(load, theirs["steps"], our_steps(load))) is not None:
            differences.append(difference)
    if differences:
        pytest.fail(f"{len(differences)} of {num_runs} workloads differ; the first:\n{differences[0]}", pytrace=False)
    if num_runs >= DEFAULT_RUNS:
        assert {rule: reached[rule] for rule in RULES if reached[rule] < 5} == {}
        assert sum(spec["n"] > 1 and len(spec["prompts"]) > 1 for load in loads for spec in load["requests"]) > 100


def test_the_engine_names_of_a_group_lead_back_to_its_requests() -> None:
    """A request that the engine shows is found by the numbers of its prompt and of the response."""
    load = sampling_workload(3)
    names = [one.request_id for one in our_requests(load)]
    found = [parts_of(f"{name}-0a1b2c3d") for name in names]
    expected = [
        (spec["id"], prompt, sequence)
        for spec in load["requests"]
        for prompt in range(len(spec["prompts"]))
        for sequence in range(spec["n"])
    ]
    assert [tuple(one) for one in found] == expected
