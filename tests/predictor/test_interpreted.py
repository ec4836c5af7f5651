"""Kernels give the same results compiled and interpreted, and no index is out of bounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from predictor.batching import BATCHERS
from tests.interpreted import run
from tests.python_process import run_python
from tests.strategies import Load, examples, loads

CLOSE = 1e-9
LOADS_EACH = 8


def drawn(batcher: str, count: int) -> list[Load]:
    """Draw a few loads, always the same; the last ones of many, because the first ones are the simplest."""
    found: list[Load] = []

    @settings(examples(4 * count), phases=[Phase.generate])
    @given(loads(batcher, ending=True, max_requests=6, tick_s=0.01))
    def collect(load: Load) -> None:
        found.append(load)

    collect()
    return found[-count:]


@pytest.mark.slow
def test_interpreted_kernels_stay_within_their_arrays_and_do_the_same() -> None:
    """Runs, forecasts and snapshots are equal; interpreted arrays refuse indices that compiled code accepts."""
    workloads = [load for batcher in BATCHERS for load in drawn(batcher, LOADS_EACH)]
    lines = "".join(json.dumps(asdict(load)) + "\n" for load in workloads)
    output = run_python("-m", "tests.interpreted", interpreted=True, text=lines, PYTHONWARNINGS="error")
    answers = [json.loads(line) for line in output.splitlines()]
    for load, theirs in zip(workloads, answers, strict=True):
        ours: dict[str, Any] = json.loads(json.dumps(run(load)))
        assert ours["counts"] == theirs["counts"]
        for our, their in zip(ours["times"], theirs["times"], strict=True):
            assert our == pytest.approx(their, rel=CLOSE, abs=CLOSE)
        numbers = [[value for value in side["forecast"] if isinstance(value, int | float)] for side in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=CLOSE, abs=CLOSE)
