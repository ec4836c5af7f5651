"""The same workloads on this project's engine, with the same steps to compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice, zip_longest
from typing import Any

from predictor.config import EngineConfig
from predictor.request import Request
from predictor.step_time import StepTime
from services.simulator.replay import replay_steps

ONE_SECOND = StepTime(constant_s=1.0, empty_s=1.0)


def our_steps(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay a workload on the engine model, every step taking one second."""
    requests = []
    for spec in workload["requests"]:
        fields = {**spec, "request_id": spec["id"], "prefix_hashes": tuple(spec["prefix_hashes"])}
        del fields["id"]
        requests.append(Request(**fields))
    steps = replay_steps(EngineConfig(**workload["engine"]), ONE_SECOND, requests)
    return [asdict(step) for step in islice(steps, workload["max_steps"])]


def first_difference(
    workload: dict[str, Any], theirs: Iterable[dict[str, Any]], ours: Iterable[dict[str, Any]]
) -> str | None:
    """Say in one message where two runs part, or nothing if they never do; scheduled tokens compare in order."""
    for index, (their, our) in enumerate(zip_longest(theirs, ours)):
        where = f"seed {workload['seed']}, step {index}"
        if their is None or our is None:
            return f"{where}: {'they' if their is None else 'we'} stopped before it\nengine {workload['engine']}"
        for name in their:
            if their[name] != our[name] or (name == "scheduled" and list(their[name]) != list(our[name])):
                return f"{where}, {name}: they have {their[name]}, we have {our[name]}\nengine {workload['engine']}"
    return None
