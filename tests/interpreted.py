"""Runs of loads with interpreted kernels, in which an index that is out of bounds or negative raises an error.

As a program, `NUMBA_DISABLE_JIT=1 python -m tests.interpreted` reads a load as JSON from each line of its input, and
prints the result of `run`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.snapshot_of_engine import snapshot_of
from predictor.state import State
from tests.inspecting import counts_of, times_of
from tests.strategies import AFFINE, Load


class Strict(np.ndarray):
    """An array without negative indices."""

    def __getitem__(self, index: Any) -> Any:
        """Reject a negative index."""
        return super().__getitem__(from_the_front(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Reject a negative index."""
        super().__setitem__(from_the_front(index), value)


class StrictRecords(np.recarray):
    """A record array without negative indices."""

    def __getitem__(self, index: Any) -> Any:
        """Reject a negative index."""
        return super().__getitem__(from_the_front(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Reject a negative index."""
        super().__setitem__(from_the_front(index), value)


def from_the_front(index: Any) -> Any:
    """Return an index; reject one that is negative or has a negative part."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int | np.integer) and part < 0:
            raise IndexError(f"index {part} is negative")
    return index


def strictly(engine: Engine) -> Engine:
    """Replace an engine's arrays by ones without negative indices."""
    arrays = [array.view(StrictRecords if array.dtype.names else Strict) for array in engine.state[:-1]]
    engine.state = State(*arrays, engine.state.costs)
    return engine


def run(load: Load, *, interpreted: bool = False) -> dict[str, Any]:
    """Run half of a load, forecast a request, copy the engine by a snapshot, run both to the end; return all results."""
    dress = strictly if interpreted else lambda engine: engine
    last = max(spec["arrival_s"] for spec in load.requests)
    halfway_s = last + 0.05
    engine = dress(load.loaded(AFFINE))
    engine.advance(halfway_s)
    candidate = {**load.requests[0], "id": "candidate"}
    (request,) = Load(engine=load.engine, requests=[candidate]).our_requests()
    forecast = Forecaster(engine).forecast([request], halfway_s)
    copied = dress(engine_from(snapshot_of(engine, halfway_s), AFFINE))
    engine.advance()
    copied.advance()
    return {
        "forecast": astuple(forecast[0]),
        "counts": [counts_of(engine), counts_of(copied)],
        "times": [times_of(engine), times_of(copied)],
    }


def main(lines: Iterable[str]) -> None:
    """Run each load."""
    for line in lines:
        print(json.dumps(run(Load(**json.loads(line)), interpreted=True)))  # noqa: T201 - output of a program


if __name__ == "__main__":
    main(sys.stdin)
