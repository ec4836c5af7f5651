"""The numbers about an instance that policies may read, from the engine model that stands as the engine does."""

from __future__ import annotations

import numpy as np

from predictor.compiled import direct, kernel
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import constant_profile
from predictor.state import State
from services.predictor_server.engine_view import EngineView

SUMS = (
    "num_reserved_blocks",
    "num_waiting_blocks",
    "queued_prefill_tokens",
    "context_tokens",
    "remaining_tokens",
)


def indicators_of(picture: EngineView, num_reserved: int) -> dict[str, float]:
    """Sum up a picture."""
    engine = picture.engine
    state = engine.state
    head = state.engine[0]
    sums = np.zeros(len(SUMS))
    sum_up(state, sums)
    return {
        "num_running": float(head.num_running),
        "num_waiting": float(head.num_waiting),
        "num_reserved": float(num_reserved),
        "num_total_blocks": float(engine.num_blocks),
        "num_free_blocks": float(head.num_free_blocks),
        **dict(zip(SUMS, sums.tolist(), strict=True)),
        **picture.counters,
    }


def warm_indicators() -> None:
    """Compile the sums, or load them from the cache, before anybody waits for them."""
    engine = Engine(EngineConfig(num_gpu_blocks=32, max_model_len=64), constant_profile().step_time)
    picture = EngineView(
        engine=engine, forecaster=Forecaster(engine), now_s=0.0, clock_rate=1.0, age_s=0.0, late_s=0.0, serial=0
    )
    indicators_of(picture, 0)


@direct
@kernel
def sum_up(state: State, sums: np.ndarray) -> None:
    """Sum up what is on the engine and what is promised to it, in the order of SUMS; numpy takes ten times as long."""
    head, requests = state.engine[0], state.requests
    block_size, waiting, pending = head.block_size, state.waiting, state.pending
    for place in range(head.num_running):
        request = requests[state.running[place]]
        sums[2] += max(0, request.prefill_tokens - request.computed_tokens)
        sums[3] += request.computed_tokens
        sums[4] += request.final_tokens - request.output_tokens
    for place in range(head.num_waiting):
        request = requests[waiting[(head.waiting_head + place) % len(waiting)]]
        tokens = request.prompt_tokens + request.output_tokens
        sums[1] += -(-tokens // block_size)
        sums[2] += tokens
        sums[4] += request.final_tokens - request.output_tokens
    for place in range(head.num_pending):
        request = requests[pending[(head.pending_head + place) % len(pending)]]
        sums[0] += -(-request.prompt_tokens // block_size)
        sums[2] += request.prompt_tokens
        sums[4] += request.final_tokens - request.output_tokens
