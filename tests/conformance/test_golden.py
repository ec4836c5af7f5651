"""Compares the engine model with recorded decisions of vLLM 0.32's scheduler (`scripts/record_golden.py`)."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.compare import first_difference
from tests.conformance.leg_workloads import LegReplay
from tests.conformance.ours import our_steps
from tests.oracle import vllm_v1

GOLDEN = Path(__file__).parents[1] / "golden"


def records(name: str) -> list[dict[str, Any]]:
    """Read recorded traces."""
    return [json.loads(line) for line in gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes()).splitlines()]


RECORDS, LEG_RECORDS = records("vllm_v1"), records("vllm_legs")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"seed{record['seed']}")
def test_the_engine_model_repeats_a_golden_trace(record: dict[str, Any]) -> None:
    """The engine model makes vLLM's recorded decision at every step."""
    difference = first_difference(record, record["steps"], our_steps(record))
    assert difference is None, difference


@pytest.mark.parametrize("record", LEG_RECORDS, ids=lambda record: f"seed{record['seed']}")
def test_the_engine_model_repeats_a_golden_trace_of_legs(record: dict[str, Any]) -> None:
    """So it does with prefill and decode legs."""
    difference = first_difference(record, record["steps"], LegReplay(record).steps())
    assert difference is None, difference


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"seed{record['seed']}")
def test_the_oracle_repeats_a_golden_trace(record: dict[str, Any]) -> None:
    """So does the plain model that other tests use."""
    steps = vllm_v1.replay_steps(record["engine"], record["requests"])
    difference = first_difference(record, record["steps"], islice(steps, record["max_steps"]))
    assert difference is None, difference
