"""One engine that serves a list of requests on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predictor.config import EngineConfig
from predictor.engine import Engine, Outcome, StepRecord
from predictor.request import RequestFacts
from predictor.step_time import StepTime


def replay(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> list[Outcome]:
    """Serve all requests from event to event; return their outcomes in the order of the requests."""
    engine = loaded_engine(config, step_time, requests)
    engine.advance()
    return [engine.outcome(request.request_id) for request in requests]


def replay_steps(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> Iterator[StepRecord]:
    """Serve all requests step by step; yield every step."""
    engine = loaded_engine(config, step_time, requests)
    while (step := engine.next_step()) is not None:
        yield step


def loaded_engine(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> Engine:
    """Make an engine to which all requests have been added; an invalid request is rejected by its index."""
    engine = Engine(config, step_time)
    by_id = {request.request_id: rank for rank, request in enumerate(sorted(requests, key=lambda r: r.request_id))}
    for index, request in enumerate(requests):
        try:
            if request.length() is None:
                raise ValueError("output_tokens: is missing")
            engine.add(request, tie_break=by_id[request.request_id])
        except ValueError as error:
            raise ValueError(f"requests[{index}].{error}") from error
    return engine
