"""Runs of loads whose kernels may be interpreted: then an index out of bounds raises, and so does a negative one.

As a program, `NUMBA_DISABLE_JIT=1 python -m tests.interpreted`, it reads a load as JSON from each line of its input
and writes what `run` makes of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import numpy as np

from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.state import State
from predictor.transfer import engine_from, snapshot_of
from tests.inspecting import counts_of, times_of
from tests.strategies import AFFINE, Load


class Strict(np.ndarray):
    """An array that counts from the front only."""

    def __getitem__(self, index: Any) -> Any:
        """Refuse what NumPy would take for an index from the end."""
        return super().__getitem__(from_the_front(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse what NumPy would take for an index from the end."""
        super().__setitem__(from_the_front(index), value)


class StrictRecords(np.recarray):
    """A record array that counts from the front only."""

    def __getitem__(self, index: Any) -> Any:
        """Refuse what NumPy would take for an index from the end."""
        return super().__getitem__(from_the_front(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Refuse what NumPy would take for an index from the end."""
        super().__setitem__(from_the_front(index), value)


def from_the_front(index: Any) -> Any:
    """Pass an index through unless it is negative, or has a negative part."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int | np.integer) and part < 0:
            raise IndexError(f"index {part} is negative")
    return index


def strictly(engine: Engine) -> Engine:
    """Let an engine's kernels work on arrays that count from the front only, where they are interpreted."""
    arrays = [array.view(StrictRecords if array.dtype.names else Strict) for array in engine.state[:-1]]
    engine.state = State(*arrays, engine.state.costs)
    return engine


def run(load: Load, *, interpreted: bool = False) -> dict[str, Any]:
    """Run a load halfway, forecast a request, copy the engine by a snapshot, run both to their ends, and tell all."""
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
    """Answer each load."""
    for line in lines:
        print(json.dumps(run(Load(**json.loads(line)), interpreted=True)))  # noqa: T201 a program's answer


if __name__ == "__main__":
    main(sys.stdin)
