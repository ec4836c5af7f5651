"""One engine over a list of requests, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predictor.config import EngineConfig
from predictor.engine import Engine, Outcome, StepRecord
from predictor.request import Request
from predictor.step_time import StepTime


def replay(config: EngineConfig, step_time: StepTime, requests: Sequence[Request]) -> list[Outcome]:
    """Serve the requests to their ends, from event to event; outcomes come in the order of the requests."""
    engine = loaded_engine(config, step_time, requests)
    engine.advance()
    return [engine.outcome(request.request_id) for request in requests]


def replay_steps(config: EngineConfig, step_time: StepTime, requests: Sequence[Request]) -> Iterator[StepRecord]:
    """Serve the requests one step at a time, and tell about each."""
    engine = loaded_engine(config, step_time, requests)
    while (step := engine.next_step()) is not None:
        yield step


def loaded_engine(config: EngineConfig, step_time: StepTime, requests: Sequence[Request]) -> Engine:
    """Make an engine that knows when each request will arrive; a bad one is refused by its place."""
    engine = Engine(config, step_time)
    by_id = {request.request_id: rank for rank, request in enumerate(sorted(requests, key=lambda r: r.request_id))}
    for place, request in enumerate(requests):
        try:
            if request.length() is None:
                raise ValueError("output_tokens: is missing")
            engine.add(request, tie_break=by_id[request.request_id])
        except ValueError as error:
            raise ValueError(f"requests[{place}].{error}") from error
    return engine
