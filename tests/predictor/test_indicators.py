"""The indicators of a view, against a plain reading of the same engine model; and counters of the last minute."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.compiled import interpreted
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_view import EngineView
from predictor.forecast import Forecaster
from predictor.indicators import MINUTE_S, EngineCounters, indicators_of
from predictor.load import LOAD, MIN_REQUESTS, _seconds_with
from predictor.profile import load_profile
from predictor.request import RequestFacts, Slo
from predictor.tabulated_costs import tabulate
from tests.load_by_hand import load_by_hand
from tests.strategies import AFFINE, Load, examples, load_of, loads

TARGETS = ((None, None), (1.0, None), (1.0, 0.05), (None, 0.5), (2.0, 0.25))


@examples(150)
@given(load=loads("vllm_v1"), steps=st.integers(0, 12))
def test_indicators_sum_up_the_model(load: Load, steps: int) -> None:
    """Whatever runs, waits, or is reserved, after any number of steps."""
    for number, spec in enumerate(load.requests):
        spec["ttft_slo_s"], spec["tpot_slo_s"] = TARGETS[number % len(TARGETS)]
    engine = load.loaded(AFFINE)
    for _ in range(steps):
        if engine.next_step() is None:
            break
    view = EngineView(
        engine=engine, forecaster=Forecaster(engine), now_s=engine.now_s, clock_rate=1.0, age_s=0.0, overdue_s=0.0,
        serial=1, counters={"pace": 1.25},
    )  # fmt: skip
    indicators = indicators_of(view, 3)
    state, head = engine.state, engine.state.engine[0]
    running = [state.requests[slot] for slot in state.running[: head.num_running]]
    waiting = [
        state.requests[state.waiting[(head.waiting_head + n) % len(state.waiting)]] for n in range(head.num_waiting)
    ]
    pending = [
        state.requests[state.pending[(head.pending_head + n) % len(state.pending)]] for n in range(head.num_pending)
    ]

    def blocks(tokens: int) -> int:
        return (int(tokens) + load.config.block_size - 1) // load.config.block_size

    assert indicators == {
        "num_running": len(engine.running()),
        "num_waiting": len(engine.waiting()),
        "num_reserved": 3,
        "num_total_blocks": engine.num_blocks,
        "num_free_blocks": head.num_free_blocks,
        "num_reserved_blocks": sum(blocks(one.prompt_tokens) for one in pending),
        "num_waiting_blocks": sum(blocks(one.prompt_tokens + one.output_tokens) for one in waiting),
        "queued_prefill_tokens": (
            sum(max(0, int(one.prefill_tokens) - int(one.computed_tokens)) for one in running)
            + sum(int(one.prompt_tokens) + int(one.output_tokens) - int(one.computed_tokens) for one in waiting)
            + sum(int(one.prompt_tokens) for one in pending)
        ),
        "context_tokens": sum(int(one.computed_tokens) for one in running),
        "remaining_tokens": sum(
            int(one.final_tokens) - int(one.output_tokens) for one in (*running, *waiting, *pending)
        ),
        "num_fetching": 0,
        "num_held_blocks": 0,
        "pace": 1.25,
        **{name: pytest.approx(value) for name, value in load_by_hand(state, load.config).items()},
    }
    assert len(running) == len(engine.running())


def test_load_is_told_as_time_on_the_wall_clock() -> None:
    """Where an engine's clock runs at another rate."""
    engine = load_of("vllm_v1", (20, 5), (30, 5), slos=[(1.0, 0.2), (1.0, 0.1)]).loaded(AFFINE)
    engine.next_step()
    values = []
    for clock_rate in (1.0, 4.0):
        view = EngineView(
            engine=engine, forecaster=Forecaster(engine), now_s=0.0, clock_rate=clock_rate, age_s=0.0, overdue_s=0.0,
            serial=1,
        )  # fmt: skip
        values.append(indicators_of(view, 0))
    for name in LOAD:
        assert values[0][name] == pytest.approx(4.0 * values[1][name])
    assert values[0]["least_tpot_slo_s"] == 0.1


@pytest.mark.parametrize("name", ["llama-3.1-8b-h200", "llama-2-7b-a30"])
@pytest.mark.parametrize(("prompt", "response"), [(2000, 500), (300, 300), (8000, 20), (10, 900)])
def test_an_efficient_step_is_found_as_by_trying_all(name: str, prompt: int, response: int) -> None:
    """A decode in it costs hardly more than in the best step, and one in shorter steps costs more."""
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048, num_gpu_blocks=30_000, max_model_len=16_384)
    engine = Engine(config, load_profile(name).step_time)
    view = EngineView(
        engine=engine, forecaster=Forecaster(engine), now_s=0.0, clock_rate=1.0, age_s=0.0, overdue_s=0.0, serial=1
    )
    one = RequestFacts(request_id="r", prompt_tokens=prompt, output_tokens=response, slo=Slo(ttft_s=9, tpot_s=1))
    for number in range(MIN_REQUESTS):
        assert indicators_of(view, 0)["efficient_step_s"] == math.inf  # too few requests
        engine.add(replace(one, request_id=str(number)))
    share, context = prompt / response, prompt + response / 2
    costs = tabulate(load_profile(name).step_time, config.max_num_batched_tokens, config.max_num_seqs)
    most = int(min(256, 2048 / (1 + share), (config.num_gpu_blocks - 1) * config.block_size / context))
    seconds = [interpreted(_seconds_with)(costs, num, share, context) for num in range(1, most + 1)]
    each = [one / num for num, one in enumerate(seconds, 1)]
    found = indicators_of(view, 0)["efficient_step_s"]
    place = seconds.index(pytest.approx(found))
    allowed = [1 + max(0.03, 0.45 / num**0.5) for num in range(1, most + 1)]
    assert each[place] <= allowed[place] * 1.05 * min(each)  # not every number of decodes is compared
    assert all(one > more * min(each) for one, more in zip(each[: max(0, place - 1)], allowed, strict=False))
    overhead_s = indicators_of(view, 0)["step_overhead_s"]
    assert 0 <= overhead_s < found
    if place + 1 < 0.45 * each.index(min(each)):
        assert found / (found - overhead_s) == pytest.approx(each[place] / min(each), rel=0.05)


def test_counters_are_of_the_last_minute() -> None:
    """Arrivals and prefix hits from before do not count; the engine's own totals do."""
    counters = EngineCounters()
    assert counters.values(1.0) == {"requests_per_minute": 0.0}
    counters.count_arrivals(3, 0.0)
    totals = {"prefix_queries": 0, "prefix_hits": 0, "num_preemptions": 2, "num_outcomes": 7, "last_step_s": 0.5}
    counters.update(totals, 0.0)
    counters.count_arrivals(1, 50.0)
    counters.update({**totals, "prefix_queries": 100, "prefix_hits": 90}, 50.0)
    values = counters.values(10.0)
    assert values == {
        "requests_per_minute": 4.0, "num_preemptions_total": 2.0, "num_finished_total": 7.0, "step_s": 0.05,
        "kv_hit_ratio": 0.9,
    }  # fmt: skip
    counters.update({**totals, "prefix_queries": 200, "prefix_hits": 90}, 51.0 + MINUTE_S)
    values = counters.values(10.0)
    assert (values["requests_per_minute"], values["kv_hit_ratio"]) == (0.0, 0.0)
