"""The same workloads on this project's engine."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Any

from predictor.config import EngineConfig
from predictor.request import EncoderInput, RequestFacts
from predictor.step_time import StepTime
from simulator.replay import replay_steps

ONE_SECOND = StepTime(constant_s=1.0, empty_s=1.0)


def our_config(workload: dict[str, Any]) -> EngineConfig:
    """Convert a workload's engine settings, which have vLLM's names."""
    return EngineConfig(**workload["engine"])


def our_requests(workload: dict[str, Any]) -> list[RequestFacts]:
    """Translate a workload's requests."""
    requests = []
    for spec in workload["requests"]:
        fields = {**spec, "request_id": spec["id"], "prefix_hashes": tuple(spec["prefix_hashes"])}
        fields["encoder_inputs"] = tuple(EncoderInput(**image) for image in spec.get("encoder_inputs", ()))
        del fields["id"]
        requests.append(RequestFacts(**fields))
    return requests


def our_steps(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay a workload on the engine model, every step taking one second."""
    steps = replay_steps(our_config(workload), ONE_SECOND, our_requests(workload))
    return [asdict(step) for step in islice(steps, workload["max_steps"])]
