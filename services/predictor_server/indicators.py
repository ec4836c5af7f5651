"""The numbers about an instance that policies may read, from the engine model that stands as the engine does."""

from __future__ import annotations

import numpy as np

from predictor.engine import Engine
from services.predictor_server.picture import Picture


def indicators_of(picture: Picture, num_reserved: int) -> dict[str, float]:
    """Sum up a picture."""
    engine = picture.engine
    state = engine.state
    head = state.engine[0]
    running = state.requests[state.running[: head.num_running]]
    waiting = state.requests[_ring(state.waiting, int(head.waiting_head), int(head.num_waiting))]
    pending = state.requests[_ring(state.pending, int(head.pending_head), int(head.num_pending))]
    held = running["computed_tokens"]
    return {
        "num_running": float(head.num_running),
        "num_waiting": float(head.num_waiting),
        "num_reserved": float(num_reserved),
        "num_total_blocks": float(engine.num_blocks),
        "num_free_blocks": float(head.num_free_blocks),
        "num_reserved_blocks": _blocks(engine, pending["prompt_tokens"]),
        "num_waiting_blocks": _blocks(engine, waiting["prompt_tokens"] + waiting["output_tokens"]),
        "queued_prefill_tokens": float(
            np.maximum(0, running["prefill_tokens"] - held).sum()
            + (waiting["prompt_tokens"] + waiting["output_tokens"]).sum()
            + pending["prompt_tokens"].sum()
        ),
        "context_tokens": float(held.sum()),
        "remaining_tokens": float(
            sum((rows["final_tokens"] - rows["output_tokens"]).sum() for rows in (running, waiting, pending))
        ),
        **picture.counters,
    }


def _ring(ring: np.ndarray, head: int, length: int) -> np.ndarray:
    places = (head + np.arange(length)) % len(ring)
    slots: np.ndarray = ring[places]
    return slots


def _blocks(engine: Engine, tokens: np.ndarray) -> float:
    return float((-(-tokens // engine.config.block_size)).sum())
