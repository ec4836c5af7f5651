"""Windows of engines that are the engine model itself, so that the truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictor.config import EngineConfig
from predictor.fitting.regression import COLUMNS, Steps
from predictor.profile import Profile, Transit, load_profile
from predictor.request import RequestFacts
from predictor.snapshot import Snapshot
from predictor.step_time import StepTime
from simulator.accuracy.window import (
    CLIENT,
    LENGTH,
    ObservedRequest,
    ObservedSteps,
    ObservedWindow,
    WindowHeader,
    steps_from,
)
from simulator.replay import loaded_engine

A30 = load_profile("llama-2-7b-a30")
CONFIG = EngineConfig(max_num_seqs=12, max_num_batched_tokens=512, num_gpu_blocks=400, max_model_len=1024)


def requests(num: int, rate: float, seed: int = 1) -> list[RequestFacts]:
    """Draw requests that arrive as a Poisson process."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, num))
    return [
        RequestFacts(
            request_id=f"r{number:03}",
            arrival_s=float(arrival_s),
            prompt_tokens=int(draw.integers(5, 400)),
            output_tokens=int(draw.integers(2, 120)),
        )
        for number, arrival_s in enumerate(arrivals)
    ]


def window_of(
    step_time: StepTime, served: Sequence[RequestFacts], config: EngineConfig = CONFIG, profile: Profile = A30
) -> ObservedWindow:
    """Serve requests with a step time, and return what an observer of the engine sees."""
    engine = loaded_engine(config, step_time, served)
    columns: dict[str, list[float]] = {name: [] for name in ("number", "start_s", *COLUMNS)}
    while (step := engine.next_step()) is not None:
        row = engine.state.steps[(engine.state.engine[0].oldest + engine.state.engine[0].num_in_flight - 1) % 2]
        for name, values in columns.items():
            own = {"number": step.step, "seconds": step.end_s - step.start_s}
            values.append(float(own[name]) if name in own else float(row[name]))
    outcomes = [engine.outcome(one.request_id) for one in served]
    return ObservedWindow(
        header=WindowHeader(
            engine=config, begin_s=0.0, end_s=max(one.finished_s or 0.0 for one in outcomes), profile=profile.name
        ),
        requests=tuple(
            ObservedRequest(
                facts=facts,
                ended=LENGTH,
                scheduled_s=outcome.scheduled_s,
                first_token_s=outcome.first_token_s,
                last_token_s=outcome.finished_s,
            )
            for facts, outcome in zip(served, outcomes, strict=True)
        ),
        steps=steps_from({name: np.array(values) for name, values in columns.items()}),
        profile=profile,
    )


def seen_by_client(window: ObservedWindow, transit: Transit) -> ObservedWindow:
    """Return what a client of the engine sees: no steps, and times that contain the way there and back."""
    return replace(
        window,
        header=replace(window.header, clock=CLIENT, end_s=window.header.end_s + transit.outward_s),
        requests=tuple(
            replace(
                one,
                facts=replace(one.facts, arrival_s=one.facts.arrival_s - transit.inward_s),
                scheduled_s=None,
                first_token_s=one.first_token_s + transit.outward_s,
                last_token_s=one.last_token_s + transit.outward_s,
            )
            for one in window.requests
        ),
        steps=steps_from({name: np.empty(0) for name in ("number", "start_s", *COLUMNS)}),
    )


def with_seconds(steps: ObservedSteps, seconds: np.ndarray) -> ObservedSteps:
    """Return steps with other durations."""
    columns = {name: getattr(steps.columns, name) for name in COLUMNS} | {"seconds": seconds}
    return replace(steps, columns=Steps(**columns))


def from_the_middle(window: ObservedWindow, state: Snapshot) -> ObservedWindow:
    """Return the part of a window from a moment on, at which the engine was in a state."""
    at_s = state.taken_s
    return replace(
        window,
        header=replace(window.header, begin_s=at_s),
        requests=tuple(one for one in window.requests if one.last_token_s > at_s),
        steps=window.steps.where(window.steps.start_s >= at_s),
        state=state,
    )
