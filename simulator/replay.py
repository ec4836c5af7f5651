"""One engine that serves a list of requests on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.gain import ServedRequests, default_levels, service_levels_of
from predictor.outcome import Outcome, StepRecord
from predictor.request import RequestFacts
from predictor.state import NONE
from predictor.step_time import StepTime
from simulator.progress import followed


def replay(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> list[Outcome]:
    """Serve all requests from event to event; return their outcomes in the order of the requests."""
    engine = loaded_engine(config, step_time, requests)
    engine.advance()
    return [engine.outcome(request.request_id) for request in followed(requests, "reading results", len(requests))]


def served_requests(requests: Sequence[RequestFacts], outcomes: Sequence[Outcome]) -> ServedRequests:
    """Return what requests asked for, and what they got."""
    whole = [
        request.output_tokens or outcome.output_tokens for request, outcome in zip(requests, outcomes, strict=True)
    ]
    finished = np.array([outcome.finished_s is not None for outcome in outcomes])
    return ServedRequests(
        levels=service_levels_of(requests) or default_levels(len(requests)),
        prompt_tokens=np.array([request.prompt_tokens for request in requests]),
        # engines cut responses that do not fit their context
        output_tokens=np.where(finished, [outcome.output_tokens for outcome in outcomes], whole),
        ttft_s=np.array([outcome.ttft_s for outcome in outcomes], np.float64),
        tpot_s=np.array([outcome.tpot_s for outcome in outcomes], np.float64),
        tokens_on_time=np.array(
            [NONE if outcome.tokens_on_time is None else outcome.tokens_on_time for outcome in outcomes]
        ),
        finished=finished,
    )


def replay_steps(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> Iterator[StepRecord]:
    """Serve all requests step by step; yield every step."""
    engine = loaded_engine(config, step_time, requests)
    while (step := engine.next_step()) is not None:
        yield step


def loaded_engine(config: EngineConfig, step_time: StepTime, requests: Sequence[RequestFacts]) -> Engine:
    """Make an engine to which all requests have been added; an invalid request is rejected by its index."""
    engine = Engine(config, step_time)
    by_id = {request.request_id: rank for rank, request in enumerate(sorted(requests, key=lambda r: r.request_id))}
    for index, request in enumerate(followed(requests, "adding requests", len(requests))):
        try:
            if request.length() is None:
                raise ValueError("output_tokens: is missing")
            engine.add(request, tie_break=by_id[request.request_id])
        except ValueError as error:
            raise ValueError(f"requests[{index}].{error}") from error
    return engine
