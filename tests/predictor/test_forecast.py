"""Forecasts equal what happens when the request really arrives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.batching import BATCHERS
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.forecast_result import Forecast
from predictor.request import RequestFacts, Slo
from predictor.reserved_requests import ReservedRequests
from predictor.state import FINISHED
from predictor.step_time import Curve, StepTime
from tests.inspecting import frozen
from tests.oracle import faster_transformer, lightllm, orca, ordered_rules, sarathi, sglang, vllm_v0, vllm_v1
from tests.strategies import AFFINE, Load, affine_seconds, examples, load_of, loads

CLOSE = 1e-9
every_batcher = pytest.mark.parametrize("batcher", BATCHERS)
# The generic engine stands for no real one, and has no plain model.
every_modelled_batcher = pytest.mark.parametrize("batcher", [name for name in BATCHERS if name != "generic"])
LOADS = {batcher: loads(batcher, ending=True, max_requests=12, tick_s=0.004) for batcher in BATCHERS}
moments = st.floats(0.0, 1.05)
# no multiples of a tick: an arrival at the very end of a step would depend on rounding
DELAYS = st.sampled_from((0.0, 0.0031, 0.0177, 0.13, 0.71)) | st.floats(0.001, 1.0)
ORACLES = {
    "vllm_v1": vllm_v1.replay_steps,
    "vllm_v0": vllm_v0.replay_steps,
    "vllm_fcfs": vllm_v0.replay_steps,
    "sarathi": sarathi.replay_steps,
    "orca": orca.replay_steps,
    "sglang": sglang.replay_steps,
    "lightllm": lightllm.replay_steps,
    "faster_transformer": faster_transformer.replay_steps,
    **dict.fromkeys(ordered_rules.RULES, ordered_rules.replay_steps),
}


def split(load: Load, num_candidates: int) -> tuple[Load, list[RequestFacts]]:
    """Take the last few requests of a load as candidates, at least one and not all where there are more."""
    specs = sorted(load.requests, key=lambda spec: spec["arrival_s"])
    kept = max(min(1, len(specs) - 1), len(specs) - num_candidates)
    candidates = Load(engine=load.engine, requests=specs[kept:]).our_requests()
    return Load(engine=load.engine, requests=specs[:kept]), candidates


def at_moment(load: Load, moment: float, *, reserve: bool) -> tuple[Engine, float]:
    """Run an engine up to a moment of its run; it knows later arrivals only if they are reserved."""
    whole = load.loaded(AFFINE)
    whole.advance()
    now_s = moment * whole.now_s
    engine = Engine(load.config, AFFINE)
    for request, rank in zip(load.our_requests(), load.ranks(), strict=True):
        if reserve or request.arrival_s <= now_s:
            engine.add(request, tie_break=rank)
    engine.advance(now_s)
    return engine, now_s


def really(load: Load, moment: float, candidate: RequestFacts, *, reserve: bool) -> Forecast:
    """Run the engine with the candidate; a run without it gives the effects on the others."""
    without, now_s = at_moment(load, moment, reserve=reserve)
    there = [name for name in without.slots if without.outcome(name).finished_s is None]
    at_present, _ = at_moment(load, moment, reserve=reserve)
    without.advance()
    engine, now_s = at_moment(load, moment, reserve=reserve)
    engine.add(arrived(candidate, now_s))
    weights = {one.request_id: one.weight for one in load.our_requests()}
    before = {name: on_time(at_present, name) for name in there}
    engine.advance()
    outcome = engine.outcome(candidate.request_id)
    assert outcome.scheduled_s is not None
    assert outcome.first_token_s is not None
    assert outcome.finished_s is not None
    delays = [engine.outcome(name).finished_s - without.outcome(name).finished_s for name in there]
    others_preempted = sum(engine.outcome(name).num_preemptions for name in there)
    others_preempted -= sum(without.outcome(name).num_preemptions for name in there)
    return Forecast(
        request_id=candidate.request_id,
        ttft_s=outcome.first_token_s - now_s,
        e2e_s=outcome.finished_s - now_s,
        tpot_s=outcome.tpot_s or 0.0,
        queue_s=outcome.scheduled_s - now_s,
        output_tokens=outcome.output_tokens,
        num_preemptions=outcome.num_preemptions,
        prefix_hit_tokens=outcome.prefix_hit_tokens,
        others_preempted=others_preempted,
        delay_sum_s=sum(delays),
        delay_worst_s=max(delays, default=0.0),
        attained=float(attains(engine, candidate.request_id)),
        others_missed=sum(attains(without, name) and not attains(engine, name) for name in there),
        gain_before=sum(weights[name] * (on_time(without, name) - before[name]) for name in there),
        gain_after=candidate.weight * on_time(engine, candidate.request_id)
        + sum(weights[name] * (on_time(engine, name) - before[name]) for name in there),
    )


def arrived(candidate: RequestFacts, now_s: float) -> RequestFacts:
    """The request as it arrives at the engine; its deadlines count from now."""
    return replace(candidate, arrival_s=now_s + candidate.in_s, waited_s=candidate.waited_s + candidate.in_s, in_s=0.0)


def on_time(engine: Engine, name: str) -> int:
    """The number of a request's tokens that came by their deadlines."""
    return engine.outcome(name).tokens_on_time or 0


def attains(engine: Engine, name: str) -> bool:
    """Whether all tokens of a request that has ended came by their deadlines."""
    outcome, slo = engine.outcome(name), engine.request_in(engine.slots[name]).slo
    if outcome.tokens_on_time is None or slo is None:
        return True
    return outcome.tokens_on_time >= (1 if slo.tpot_s is None else outcome.output_tokens)


def expect_close(ours: Forecast, theirs: Forecast, *, only_shared: bool = False) -> None:
    """Compare two forecasts: counts exactly, times within rounding; the least slack where both know it."""
    for name in Forecast.__dataclass_fields__:
        our, their = getattr(ours, name), getattr(theirs, name)
        if name == "least_slack_s" and their is None:  # see test_deadline_forecast.py
            continue
        if only_shared and (our is None or their is None):
            continue
        close = isinstance(our, float) and isinstance(their, float)
        assert our == (pytest.approx(their, rel=CLOSE, abs=CLOSE) if close else their), name


@every_batcher
@pytest.mark.parametrize("reserve", [False, True], ids=["", "reserved"])
def test_a_forecast_is_what_happens(batcher: str, reserve: bool) -> None:
    """Times, preemptions and hits are those of the real request, and delays those of the others."""

    @examples(30)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        others, (candidate,) = split(load, 1)
        engine, now_s = at_moment(others, moment, reserve=reserve)
        (forecast,) = Forecaster(engine).forecast([candidate], now_s)
        expected = really(others, moment, candidate, reserve=reserve)
        worst = max(expected.delay_worst_s, 0.0)  # no delay where all others end earlier
        expect_close(forecast, replace(expected, delay_worst_s=worst))

    check()


@every_batcher
@pytest.mark.parametrize("reserve", [False, True], ids=["", "reserved"])
def test_a_forecast_of_a_later_arrival_is_what_happens(batcher: str, reserve: bool) -> None:
    """A candidate that arrives `in_s` from now finds the engine's state of then, and the requests that arrive before it."""

    @examples(30)
    @given(LOADS[batcher], moments, DELAYS)
    def check(load: Load, moment: float, in_s: float) -> None:
        others, (candidate,) = split(load, 1)
        candidate = replace(candidate, in_s=in_s)
        engine, now_s = at_moment(others, moment, reserve=reserve)
        for delays in (True, False):
            (forecast,) = Forecaster(engine).forecast([candidate], now_s, delays=delays)
            expected = really(others, moment, candidate, reserve=reserve)
            worst = max(expected.delay_worst_s, 0.0)
            expect_close(forecast, replace(expected, delay_worst_s=worst), only_shared=not delays)
            assert forecast.queue_s >= in_s - CLOSE

    check()


@every_modelled_batcher
def test_a_later_arrival_has_the_times_of_the_oracle(batcher: str) -> None:
    """The plain step-by-step model, which knows all arrivals, starts and ends the candidate at the same times."""
    compared = []

    @examples(30)
    @given(LOADS[batcher], moments, DELAYS.filter(bool))  # simultaneous arrivals would be ordered by their ids
    def check(load: Load, moment: float, in_s: float) -> None:
        *others, last = sorted(load.requests, key=lambda spec: spec["arrival_s"])
        if not others:
            return
        rest = Load(engine=load.engine, requests=others)
        last = {**last, "id": "candidate", "max_tokens": last["output_tokens"]}
        candidate = replace(Load(engine=load.engine, requests=[last]).our_requests()[0], in_s=in_s)
        engine, now_s = at_moment(rest, moment, reserve=True)
        (forecast,) = Forecaster(engine).forecast([candidate], now_s, delays=False)
        arriving = {**last, "arrival_s": now_s + in_s}
        if last.get("ttft_slo_s") is not None:
            arriving["ttft_slo_s"] = last["ttft_slo_s"] - in_s  # from now on
        try:
            steps = list(ORACLES[batcher](load.engine, [*others, arriving], affine_seconds))
        except sglang.OutOfPagesError:  # SGLang itself fails here
            return
        own = [step for step in steps if "candidate" in step["scheduled"]]
        if not load.config.async_scheduling:  # a step that is planned ahead starts later than it is planned
            assert forecast.queue_s == pytest.approx(own[0]["start_s"] - now_s, rel=CLOSE, abs=CLOSE)
        assert forecast.e2e_s == pytest.approx(own[-1]["end_s"] - now_s, rel=CLOSE, abs=CLOSE)
        compared.append(in_s)

    check()
    assert len(compared) >= 15


@every_batcher
def test_requests_reserved_for_later_are_counted_when_they_arrive(batcher: str) -> None:
    """A reservation with `in_s` delays the candidate as the request itself does when it arrives then."""

    @examples(20)
    @given(LOADS[batcher], moments, DELAYS, DELAYS)
    def check(load: Load, moment: float, in_s: float, candidate_in_s: float) -> None:
        others, candidates = split(load, 2)
        candidate, reserved = replace(candidates[0], in_s=candidate_in_s), candidates[-1]
        if reserved.request_id == candidate.request_id:
            return
        (with_reservation, now_s), (with_request, _) = (at_moment(others, moment, reserve=False) for _ in range(2))
        assert ReservedRequests().add(replace(reserved, in_s=in_s), with_reservation, now_s)
        with_request.add(arrived(replace(reserved, in_s=in_s), now_s))
        (ours,) = Forecaster(with_reservation).forecast([candidate], now_s)
        (theirs,) = Forecaster(with_request).forecast([candidate], now_s)
        expect_close(ours, theirs)

    check()


@every_batcher
def test_a_forecast_leaves_the_engine_as_it_was(batcher: str) -> None:
    """No byte of the engine's state changes, and its later outcomes are the same."""

    @examples(20)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        others, candidates = split(load, 3)
        engine, now_s = at_moment(others, moment, reserve=True)
        untouched, _ = at_moment(others, moment, reserve=True)
        forecaster = Forecaster(engine)
        forecaster.forecast(candidates, now_s)  # allocates the slots of the candidates
        names, before = dict(engine.slots), frozen(engine)
        forecaster.forecast(candidates, now_s)
        assert engine.slots == names
        assert frozen(engine) == before
        for one in (engine, untouched):
            one.advance()
        for name in names:
            assert engine.outcome(name) == untouched.outcome(name)

    check()


@every_batcher
def test_forecasting_candidates_together_equals_one_by_one(batcher: str) -> None:
    """Each candidate is forecast as if it alone arrived, with and without delays."""

    @examples(25)
    @given(LOADS[batcher], moments)
    def check(load: Load, moment: float) -> None:
        others, candidates = split(load, 4)
        engine, now_s = at_moment(others, moment, reserve=False)
        forecaster = Forecaster(engine)
        together = forecaster.forecast(candidates, now_s)
        assert [forecast.request_id for forecast in together] == [request.request_id for request in candidates]
        hasty = forecaster.forecast(candidates, now_s, delays=False)
        for candidate, forecast, quick in zip(candidates, together, hasty, strict=True):
            expect_close(forecaster.forecast([candidate], now_s)[0], forecast)
            expect_close(forecast, quick, only_shared=True)
            assert (quick.others_preempted, quick.delay_sum_s, quick.delay_worst_s) == (None, None, None)

    check()


@every_batcher
def test_the_shared_simulation_is_reused(batcher: str) -> None:
    """For an unchanged engine, at the same moment or later, a forecaster returns the same as a new one.

    The same holds after a change of the engine with another serial.
    """

    @examples(25)
    @given(LOADS[batcher], moments, st.floats(0.0, 0.2))
    def check(load: Load, moment: float, later_s: float) -> None:
        others, (reserved, *candidates) = split(load, 4)
        engine, now_s = at_moment(others, moment, reserve=True)
        forecaster = Forecaster(engine)
        forecaster.prepare(now_s, serial=1)
        for then_s in (now_s, now_s, now_s + later_s):
            for delays in (False, True):
                expected = Forecaster(engine).forecast(candidates, then_s, delays=delays)
                assert forecaster.forecast(candidates, then_s, delays=delays, serial=1) == expected
        engine.add(replace(reserved, arrival_s=now_s))
        expected = Forecaster(engine).forecast(candidates, now_s + later_s)
        assert forecaster.forecast(candidates, now_s + later_s, serial=2) == expected

    check()


def test_an_idle_engine_has_no_delays() -> None:
    """The first request starts at once and runs alone."""
    load = load_of("vllm_v1", (8, 3))
    (forecast,) = Forecaster(Engine(load.config, AFFINE)).forecast(load.our_requests(), 5.0)
    alone = load.loaded(AFFINE)
    alone.advance()
    assert (forecast.queue_s, forecast.delay_sum_s, forecast.others_preempted) == (0.0, 0.0, 0)
    assert forecast.e2e_s == pytest.approx(alone.now_s, rel=CLOSE)
    assert forecast.e2e_s == pytest.approx(forecast.ttft_s + 2 * forecast.tpot_s, rel=CLOSE)


def test_a_request_that_is_never_served_has_infinite_times() -> None:
    """Behind a head of the queue that can never be admitted, all times are infinite, and others are not delayed."""
    load = load_of("orca", (4, 2), num_gpu_blocks=2)
    blocked = [RequestFacts(request_id="head", prompt_tokens=4, output_tokens=2, max_tokens=60)]
    engine = Engine(load.config, AFFINE)
    for request in blocked:
        try:
            engine.add(request)
        except ValueError:
            pytest.skip("such a head is refused already")
    (forecast,) = Forecaster(engine).forecast(load.our_requests(), 0.0)
    assert forecast.ttft_s == forecast.e2e_s == forecast.tpot_s == forecast.queue_s == math.inf
    assert forecast.delay_sum_s == 0.0


def test_a_late_request_is_never_served() -> None:
    """Behind such a head, and one that waits and is not late yet: which deadlines are kept is found without a setback."""
    load = load_of("orca", (4, 2), num_gpu_blocks=2)
    engine = Engine(load.config, AFFINE)
    engine.add(RequestFacts(request_id="head", prompt_tokens=4, output_tokens=2, max_tokens=60))
    engine.add(RequestFacts(request_id="waits", prompt_tokens=4, output_tokens=2, slo=Slo(ttft_s=9.0, tpot_s=1.0)))
    late = RequestFacts(
        request_id="late", prompt_tokens=4, output_tokens=2, slo=Slo(ttft_s=1.0, tpot_s=1.0), waited_s=5.0
    )
    for only_deadlines in (False, True):
        (forecast,) = Forecaster(engine).forecast([late], 0.0, only_deadlines=only_deadlines)
        assert (forecast.ttft_s, forecast.attained, forecast.others_missed) == (math.inf, 0.0, 0)


def test_a_refused_candidate_leaves_no_slot() -> None:
    """When one of several candidates cannot be served, all are refused, and none keeps a slot."""
    engine = load_of("vllm_v1", (8, 3)).loaded(AFFINE)
    names = set(engine.slots)
    good = RequestFacts(request_id="good", prompt_tokens=4, output_tokens=4)
    with pytest.raises(ValueError, match=r"^prompt_tokens: "):
        Forecaster(engine).forecast([good, RequestFacts(request_id="bad", prompt_tokens=4000)], 0.0)
    assert set(engine.slots) == names
    assert Forecaster(engine).forecast([good], 0.0)[0].e2e_s < math.inf


def test_a_forecaster_supports_an_engine_that_grows() -> None:
    """More requests than slots at the forecaster's creation do not change its forecasts."""
    load = load_of("vllm_v1", (8, 3), max_num_seqs=4)
    engine = Engine(load.config, AFFINE)
    early = Forecaster(engine)
    for number in range(200):
        engine.add(
            RequestFacts(request_id=f"{number}", prompt_tokens=9, output_tokens=9, prefix_hashes=(number % 7, number))
        )
    candidate = RequestFacts(request_id="new", prompt_tokens=30, output_tokens=3, prefix_hashes=(3, 10))
    assert early.forecast([candidate], 0.0) == Forecaster(engine).forecast([candidate], 0.0)


def test_a_candidate_joins_an_async_engine_that_has_nothing_left_to_plan() -> None:
    """It is planned when the last request's step ends, not after the empty step that is in flight behind it."""
    load = load_of("vllm_v1", (1, 1), async_scheduling=True, enable_prefix_caching=False)
    engine = load.loaded(AFFINE)
    engine.advance(0.0)
    assert [int(step.num_scheduled) for step in engine.state.steps] == [1, 0]
    first_ends_s = float(engine.state.steps[0].end_s)
    candidate = RequestFacts(request_id="new", prompt_tokens=1, output_tokens=1)
    for delays in (True, False):
        (forecast,) = Forecaster(engine).forecast([candidate], 0.0, delays=delays)
        assert forecast.queue_s == first_ends_s


def test_no_candidates_no_forecasts() -> None:
    """No candidates give no forecasts."""
    assert Forecaster(load_of("vllm_v1", (8, 3)).loaded(AFFINE)).forecast([], 0.0) == []


@every_batcher
def test_a_forecast_does_not_depend_on_those_before(batcher: str) -> None:
    """Old data in the workspace has no effect, also where requests end before the candidate arrives."""

    @examples(30)
    @given(LOADS[batcher], moments, moments)
    def check(load: Load, moment: float, later: float) -> None:
        others, candidates = split(load, 2)
        engine, now_s = at_moment(others, moment, reserve=True)
        whole = others.loaded(AFFINE)
        whole.advance()
        later_s = now_s + later * max(0.0, whole.now_s - now_s)
        clean, dirty = Forecaster(engine), Forecaster(engine)
        dirty.forecast(candidates, later_s)  # allocates the slots of the candidates
        dirty._workspace.requests["finished_s"] = 1e6 * np.arange(3)[:, None]
        dirty._workspace.requests["status"] = FINISHED
        assert dirty.forecast(candidates, later_s) == clean.forecast(candidates, later_s)

    check()


@pytest.mark.parametrize("delays", [True, False])
def test_the_share_of_time_outside_of_what_was_measured(delays: bool) -> None:
    """A forecast says how much of its time is in steps that are longer, or have more context, than any measured one."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=100, max_model_len=512)
    one_s = StepTime(constant_s=1.0)
    request = RequestFacts(request_id="a", prompt_tokens=40, output_tokens=60)
    for limits, share in (
        ((64, 4, 512, 512), 0.0),
        ((39, 4, 512, 512), 1 / 60),  # the prefill
        ((64, 4, 90, 512), 9 / 60),  # the last steps have 91 to 99 tokens of context
        ((64, 4, 512, 80), 19 / 60),
        ((64, 1, 10, 512), 59 / 60),
    ):
        engine = Engine(config, replace(one_s, limits=limits))
        (forecast,) = Forecaster(engine).forecast([request], 0.0, delays=delays)
        assert forecast.e2e_s == 60.0
        assert forecast.unmeasured == pytest.approx(share)


def test_paces_of_regions() -> None:
    """Steps of decodes and of chunks take longer by their own factors, also where steps are repeated at once."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks=100, max_model_len=512)
    step_time = StepTime(constant_s=1.0, decode_slope=Curve(y=(0.01,)))
    engines = [Engine(config, step_time) for _ in range(2)]
    for engine in engines:
        engine.set_region_paces(1.5, (2.0, 4.0, 3.0))
        engine.add(RequestFacts(request_id="a", prompt_tokens=40, output_tokens=20))
    fast, stepped = engines
    fast.advance()
    while stepped.next_step() is not None:
        pass
    expected = 3.0 + sum(2.0 * (1.0 + 0.01 * (40 + number)) for number in range(1, 20))
    assert fast.outcome("a").e2e_s == pytest.approx(expected)
    assert stepped.outcome("a").e2e_s == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"^by_region.mixed: must be above 0"):
        fast.set_region_paces(1.0, (1.0, 0.0, 1.0))
    fast.set_pace(1.5)
    assert fast.state.engine[0].region_pace.tolist() == [1.0, 1.0, 1.0]
