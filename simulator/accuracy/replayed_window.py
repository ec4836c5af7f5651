"""A window that is served again, by the engine model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_from_snapshot import engine_from
from predictor.forecast import Forecaster
from predictor.forecast_result import Forecast
from predictor.outcome import Outcome
from predictor.profile import NO_TRANSIT, Profile, Transit
from predictor.request import RequestFacts
from predictor.snapshot import LiveRequest, Snapshot
from predictor.step_time import StepTime
from simulator.accuracy.window import ABORT, CLIENT, ERROR, Array, ObservedRequest, ObservedWindow

PaceAt = Callable[[float], float]  # real over predicted step time at a time of the window's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """What requests experienced, by request and in seconds; NaN where it is not known."""

    arrival_s: Array
    queue_s: Array
    ttft_s: Array
    e2e_s: Array
    output_tokens: Array

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.arrival_s)

    @property
    def decode_s(self) -> Array:
        """The time from the first to the last token."""
        return self.e2e_s - self.ttft_s

    @property
    def prefill_s(self) -> Array:
        """The time from the first step with the request to its first token."""
        return self.ttft_s - self.queue_s

    @property
    def tpot_s(self) -> Array:
        """The mean time per token after the first."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return self.decode_s / gaps

    @property
    def end_s(self) -> Array:
        """When the last token came."""
        return self.arrival_s + self.e2e_s

    def where(self, chosen: np.ndarray) -> RequestTimes:
        """Return the chosen requests."""
        names = ("arrival_s", "queue_s", "ttft_s", "e2e_s", "output_tokens")
        return RequestTimes(**{name: getattr(self, name)[chosen] for name in names})


def compared_requests(window: ObservedWindow) -> list[ObservedRequest]:
    """Return the requests to compare: those that arrived in the window and came to their end, by arrival."""
    chosen = [one for one in window.requests if one.is_complete and one.facts.arrival_s >= window.header.begin_s]
    return sorted(chosen, key=lambda one: (one.facts.arrival_s, one.facts.request_id))


def measured_times(requests: Sequence[ObservedRequest]) -> RequestTimes:
    """Return what was observed."""
    arrival_s = np.array([one.facts.arrival_s for one in requests], np.float64)

    def since_arrival(name: str) -> Array:
        return np.array([getattr(one, name) for one in requests], np.float64) - arrival_s

    return RequestTimes(
        arrival_s=arrival_s,
        queue_s=since_arrival("scheduled_s"),
        ttft_s=since_arrival("first_token_s"),
        e2e_s=since_arrival("last_token_s"),
        output_tokens=np.array([one.facts.output_tokens for one in requests], np.float64),
    )


def replayed_times(
    window: ObservedWindow,
    requests: Sequence[ObservedRequest],
    step_time: StepTime,
    *,
    transit: Transit = NO_TRANSIT,
    pace_at: PaceAt | None = None,
) -> RequestTimes:
    """Serve the whole window again; return what some of its requests experience.

    `transit` counts where times were taken at a client. With `pace_at` each step takes that many times as long.
    """
    inward_s, outward_s = transit_of(window, transit)
    outcomes = outcomes_of(window, step_time, inward_s=inward_s, pace_at=pace_at)
    mine = [outcomes[one.facts.request_id] for one in requests]

    def since_arrival(name: str, extra_s: float) -> Array:
        times_s = np.array([getattr(one, name) for one in mine], np.float64)
        return times_s + extra_s - np.array([one.facts.arrival_s for one in requests], np.float64)

    return RequestTimes(
        arrival_s=np.array([one.facts.arrival_s for one in requests], np.float64),
        queue_s=since_arrival("scheduled_s", 0.0),
        ttft_s=since_arrival("first_token_s", outward_s),
        e2e_s=since_arrival("finished_s", outward_s),
        output_tokens=np.array([one.output_tokens for one in mine], np.float64),
    )


def forecast_times(
    window: ObservedWindow,
    requests: Sequence[ObservedRequest],
    step_time: StepTime,
    *,
    transit: Transit = NO_TRANSIT,
) -> RequestTimes:
    """Forecast some requests at their arrivals, with all that is present then, but without what arrives later."""
    inward_s, outward_s = transit_of(window, transit)
    engine = _engine_at_the_beginning(window, step_time)
    forecaster, compared = Forecaster(engine), {one.facts.request_id for one in requests}
    made: dict[str, Forecast] = {}
    for at_s, one in _happenings(window, inward_s, present=set(engine.slots)):
        engine.advance(at_s)
        name = one.facts.request_id
        if name in engine.slots:
            engine.abort(name, at_s=at_s)
            continue
        engine.forget_finished()
        facts = replace(_with_length(one, engine), arrival_s=at_s)
        if name in compared:
            (made[name],) = forecaster.forecast([facts], at_s, delays=False)
        engine.add(facts)
    mine = [made[one.facts.request_id] for one in requests]
    extra_s = inward_s + outward_s
    return RequestTimes(
        arrival_s=np.array([one.facts.arrival_s for one in requests], np.float64),
        queue_s=np.array([one.queue_s + inward_s for one in mine], np.float64),
        ttft_s=np.array([one.ttft_s + extra_s for one in mine], np.float64),
        e2e_s=np.array([one.e2e_s + extra_s for one in mine], np.float64),
        output_tokens=np.array([one.output_tokens for one in mine], np.float64),
    )


def _happenings(window: ObservedWindow, inward_s: float, *, present: set[str]) -> list[tuple[float, ObservedRequest]]:
    """Return arrivals and aborts in order: an abort is the second happening of its request."""
    by_id = {one.facts.request_id: one for one in window.requests}
    arrivals = [(one.facts.arrival_s + inward_s, one) for one in window.requests if one.facts.request_id not in present]
    aborts = [(at_s, by_id[name]) for at_s, name in _aborts(window, inward_s)]
    return sorted([*arrivals, *aborts], key=lambda one: (one[0], one[1].facts.request_id))


def transit_of(window: ObservedWindow, transit: Transit) -> tuple[float, float]:
    """Return the seconds to the engine and back that the window's times contain, on its clock."""
    if window.header.clock != CLIENT:
        return 0.0, 0.0
    return transit.inward_s * window.header.clock_rate, transit.outward_s * window.header.clock_rate


def outcomes_of(
    window: ObservedWindow, step_time: StepTime, *, inward_s: float = 0.0, pace_at: PaceAt | None = None
) -> dict[str, Outcome]:
    """Serve all requests of a window, from the engine's state at its beginning on; return their outcomes by id."""
    engine = _engine_at_the_beginning(window, step_time)
    present = set(engine.slots)
    for one in sorted(window.requests, key=lambda one: (one.facts.arrival_s, one.facts.request_id)):
        if one.facts.request_id not in present:
            facts = replace(_with_length(one, engine), arrival_s=one.facts.arrival_s + inward_s)
            try:
                engine.add(facts)
            except ValueError as error:
                raise ValueError(f"request {one.facts.request_id!r}: {error}") from None
    for at_s, request_id in _aborts(window, inward_s):
        _advance(engine, at_s, pace_at)
        if engine.outcome(request_id).finished_s is None:
            engine.abort(request_id, at_s=at_s)
    _advance(engine, float("inf"), pace_at)
    return {one.facts.request_id: engine.outcome(one.facts.request_id) for one in window.requests}


def _advance(engine: Engine, until_s: float, pace_at: PaceAt | None) -> None:
    if pace_at is None:
        engine.advance(until_s)
        return
    while True:
        engine.set_pace(pace_at(engine.now_s))
        if engine.next_step(until_s) is None:
            return


def _aborts(window: ObservedWindow, inward_s: float) -> list[tuple[float, str]]:
    """Return when requests were aborted, or failed, and their ids."""
    ends = [
        (one.last_token_s + inward_s, one.facts.request_id)
        for one in window.requests
        if one.ended in (ABORT, ERROR) and one.last_token_s is not None
    ]
    return sorted(ends)


def _with_length(one: ObservedRequest, engine: Engine) -> RequestFacts:
    """Return the facts with the length of the whole response: of one that did not come to its end, the longest."""
    if one.is_complete:
        return one.facts
    return _of_length(one.facts, _longest(one.facts, engine.config, engine.num_blocks))


def _of_length(facts: RequestFacts, output_tokens: int) -> RequestFacts:
    return replace(facts, output_tokens=output_tokens, tag=None)


def _longest(facts: RequestFacts, config: EngineConfig, num_blocks: int) -> int:
    """Return the longest response that a request can have."""
    room = min(config.max_model_len, num_blocks * config.block_size) - facts.prompt_tokens
    return max(1, room if facts.max_tokens is None else min(room, facts.max_tokens))


def _engine_at_the_beginning(window: ObservedWindow, step_time: StepTime) -> Engine:
    if window.state is None:
        return Engine(window.header.engine, step_time)
    by_id = {one.facts.request_id: one for one in window.requests}
    config = window.state.config

    def known(live: LiveRequest) -> LiveRequest:
        facts, one = live.request, by_id.get(live.request.request_id)
        if one is not None and one.is_complete and one.facts.output_tokens is not None:
            return replace(live, request=_of_length(facts, max(one.facts.output_tokens, live.produced_tokens + 1)))
        longest = max(_longest(facts, config, config.num_gpu_blocks - 1), live.produced_tokens + 1)
        return replace(live, request=_of_length(facts, longest))

    state: Snapshot = replace(
        window.state,
        running=tuple(known(live) for live in window.state.running),
        waiting=tuple(known(live) for live in window.state.waiting),
    )
    return engine_from(state, step_time)


def profile_times(window: ObservedWindow, requests: Sequence[ObservedRequest], profile: Profile) -> RequestTimes:
    """Serve the window again with a profile."""
    return replayed_times(window, requests, profile.step_time, transit=profile.transit)
