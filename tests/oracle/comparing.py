"""Compares a run of the engine model with the same run of an oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice, zip_longest
from typing import Any

import pytest

from tests.oracle.engine import Step
from tests.strategies import AFFINE, MAX_STEPS, ONE_SECOND, Load, affine_seconds


def our_steps(load: Load, step_time: Any = ONE_SECOND) -> Iterator[Step]:
    """Return the steps of the engine model in the oracles' form."""
    return (asdict(step) for step in iter(load.loaded(step_time).next_step, None))


def expect_same_steps(ours: Iterable[Step], theirs: Iterable[Step], *, rel: float = 0.0) -> int:
    """Fail at the first step that differs, also in the order of scheduling; return the number of steps."""
    num_steps = 0
    for our, their in islice(zip_longest(ours, theirs), MAX_STEPS):
        assert our is not None, f"the engine model ended before {their}"
        assert their is not None, f"the oracle ended before {our}"
        if rel:
            for name in ("start_s", "end_s"):
                assert our[name] == pytest.approx(their[name], rel=rel), (our, their)
                our[name] = their[name]
        assert our == their
        assert list(our["scheduled"]) == list(their["scheduled"])
        num_steps += 1
    return num_steps


def expect_oracle(load: Load, replay_steps: Any) -> Counter[str]:
    """Compare a load's run with an oracle's, with steps of a second and of realistic times; return event counts."""
    expect_same_steps(our_steps(load, AFFINE), replay_steps(load.engine, load.requests, affine_seconds), rel=1e-9)
    theirs = list(islice(replay_steps(load.engine, load.requests), MAX_STEPS))
    expect_same_steps(islice(our_steps(load), MAX_STEPS), theirs)
    return Counter(
        steps=len(theirs),
        preemptions=sum(len(step["preempted"]) for step in theirs),
        queueing=sum(bool(step["waiting"] and step["running"]) for step in theirs),
        unfilled=sum(len(step["scheduled"]) < len(step["running"]) for step in theirs),
    )


def scheduled(load: Load) -> list[dict[str, int]]:
    """List what a load's steps schedule."""
    return [step["scheduled"] for step in our_steps(load)]
