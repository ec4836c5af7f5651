"""A local scheduler written in Python only: it works like a compiled one, slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor import blocks, queues, steps
from predictor.batching import BATCHERS, Batcher, is_compiled
from predictor.batching.orca import schedule as compiled_orca
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.state import State
from tests.inspecting import counts_of, expect_blocks_conserved, expect_nothing_left, times_of
from tests.oracle.comparing import our_steps
from tests.strategies import AFFINE, Load, examples, loads

CLOSE = 1e-9


def serve_one_by_one(state: State) -> bool:
    """Serve one request at a time: the smallest possible rule."""
    engine = state.engine[0]
    if engine.num_running == 0:
        slot = queues.waiting_at(state, 0)
        queues.admit(state, 0, 0)
        num_tokens = int(steps.tokens_of(state, slot))
        blocks.allocate(state, slot, num_tokens)
        steps.assign(state, slot, num_tokens)
        return False
    slot = state.running[0]
    blocks.allocate(state, slot, state.requests[slot].computed_tokens + 1)
    steps.assign(state, slot, 1)
    return state.requests[slot].output_tokens > 0


def python_orca(state: State) -> bool:
    """Follow Orca's rule, hidden from the compiler."""
    return bool(compiled_orca.py_func(state))


def loads_for(batcher: str) -> st.SearchStrategy[Load]:
    """Draw loads of Orca's for another local scheduler."""
    return loads("orca").map(lambda load: Load(engine={**load.engine, "batcher": batcher}, requests=load.requests))


@pytest.fixture(autouse=True)
def _written_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = BATCHERS["orca"].fixed
    monkeypatch.setitem(BATCHERS, "one_by_one", Batcher(schedule=serve_one_by_one, fixed=fixed))
    monkeypatch.setitem(BATCHERS, "python_orca", Batcher(schedule=python_orca, fixed=fixed))


def test_only_kernels_run_within_the_compiled_loop() -> None:
    """Compiled and Python rules are distinguished, so that each gets the loop that can run it."""
    assert is_compiled(BATCHERS["orca"])
    assert not is_compiled(BATCHERS["python_orca"])


def test_the_same_rule_does_the_same() -> None:
    """Orca's rule in Python makes the same decisions as the compiled one, stepping and fast-forwarding."""

    @examples(25)
    @given(loads_for("python_orca"))
    def check(load: Load) -> None:
        compiled = Load(engine={**load.engine, "batcher": "orca"}, requests=load.requests)
        assert list(our_steps(load)) == list(our_steps(compiled))
        engine, other = load.loaded(AFFINE), compiled.loaded(AFFINE)
        engine.advance()
        other.advance()
        assert counts_of(engine) == counts_of(other)
        assert times_of(engine) == pytest.approx(times_of(other), rel=CLOSE, abs=CLOSE)

    check()


def test_the_smallest_rule_serves_all_requests() -> None:
    """It serves one request at a time, each to its end."""

    @examples(25)
    @given(loads_for("one_by_one"))
    def check(load: Load) -> None:
        engine = load.loaded()
        for record in iter(engine.next_step, None):
            assert len(record.running) == len(record.scheduled) == 1
            expect_blocks_conserved(engine)
        fast = load.loaded()
        fast.advance()
        for one in (engine, fast):
            expect_nothing_left(one)
        for request in load.our_requests():
            name = request.request_id
            assert engine.outcome(name) == fast.outcome(name)
            assert engine.outcome(name).output_tokens == engine.lengths(request)[0]

    check()


def test_it_can_be_forecast_with() -> None:
    """Forecasts are those of the compiled rule."""

    @examples(15)
    @given(loads_for("python_orca"), st.floats(0.0, 0.2))
    def check(load: Load, now_s: float) -> None:
        *others, candidate = load.our_requests()
        forecasts = []
        for batcher in ("python_orca", "orca"):
            engine = Engine(replace(load.config, batcher=batcher), AFFINE)
            for request in others:
                engine.add(request)
            engine.advance(now_s)
            forecasts.append(Forecaster(engine).forecast([candidate], now_s)[0])
        for name in ("ttft_s", "e2e_s", "delay_sum_s", "delay_worst_s"):
            assert getattr(forecasts[0], name) == pytest.approx(getattr(forecasts[1], name), rel=CLOSE, abs=CLOSE)

    check()
