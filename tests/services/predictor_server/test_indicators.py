"""What a picture is summed up to, against a plain reading of the same engine model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast import Forecaster
from services.predictor_server.engine_view import EngineView
from services.predictor_server.indicators import indicators_of
from tests.strategies import AFFINE, Load, examples, loads


@examples(150)
@given(load=loads("vllm_v1"), steps=st.integers(0, 12))
def test_it_says_what_is_there(load: Load, steps: int) -> None:
    """Whatever runs, waits, or is still to come, after any number of steps."""
    engine = load.loaded(AFFINE)
    for _ in range(steps):
        if engine.next_step() is None:
            break
    picture = EngineView(
        engine=engine, forecaster=Forecaster(engine), now_s=engine.now_s, clock_rate=1.0, age_s=0.0, late_s=0.0,
        serial=1, counters={"pace": 1.25},
    )  # fmt: skip
    shown = indicators_of(picture, 3)
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

    assert shown == {
        "num_running": len(engine.running()),
        "num_waiting": len(engine.waiting()),
        "num_reserved": 3,
        "num_total_blocks": engine.num_blocks,
        "num_free_blocks": head.num_free_blocks,
        "num_reserved_blocks": sum(blocks(one.prompt_tokens) for one in pending),
        "num_waiting_blocks": sum(blocks(one.prompt_tokens + one.output_tokens) for one in waiting),
        "queued_prefill_tokens": (
            sum(max(0, int(one.prefill_tokens) - int(one.computed_tokens)) for one in running)
            + sum(int(one.prompt_tokens) + int(one.output_tokens) for one in waiting)
            + sum(int(one.prompt_tokens) for one in pending)
        ),
        "context_tokens": sum(int(one.computed_tokens) for one in running),
        "remaining_tokens": sum(
            int(one.final_tokens) - int(one.output_tokens) for one in (*running, *waiting, *pending)
        ),
        "pace": 1.25,
    }
    assert len(running) == len(engine.running())
