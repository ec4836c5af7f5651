"""Surgery on an engine model that was wrong: a step taken back, a request put where it really is."""

from __future__ import annotations

import numpy as np

from predictor.engine import Engine
from predictor.state import FINISHED, RUNNING, UNBORN, WAITING

MORE_TOKENS = 32  # that are thought to come of a request that goes on beyond its limit


def rewound(engine: Engine) -> None:
    """Take back the steps under way, as if they had not been planned yet."""
    state = engine.state
    head, rows = state.engine[0], state.requests
    for ahead in reversed(range(int(head.num_in_flight))):
        index = (int(head.oldest) + ahead) % 2
        for entry in state.batch[index, : state.steps[index].num_scheduled]:
            row = rows[entry.slot]
            row.in_flight_tokens -= entry.tokens
            if row.stale_tokens > 0:
                row.stale_tokens -= entry.tokens
            elif row.status == RUNNING:
                row.computed_tokens -= entry.tokens
                if entry.sampled and head.pipeline_depth > 1:
                    row.placeholders -= 1
    head.num_in_flight = 0
    head.steady = head.stuck = 0


def recounted(engine: Engine, elsewhere: int) -> int:
    """Reckon the free blocks anew, given how many are held by nobody known; return how many are held by those known."""
    state = engine.state
    head = state.engine[0]
    held = int(state.requests["num_blocks"][state.running[: head.num_running]].sum())
    head.num_free_blocks = min(engine.num_blocks, max(0, engine.num_blocks - held - elsewhere))
    head.steady = head.stuck = 0
    return held


def taken_out(engine: Engine, slot: int) -> None:
    """Take a request out of whatever queue it is in."""
    state = engine.state
    head = state.engine[0]
    running = [int(one) for one in state.running[: head.num_running] if one != slot]
    state.running[: len(running)] = running
    head.num_running = len(running)
    head.num_waiting = _closed(state.waiting, int(head.waiting_head), int(head.num_waiting), slot)
    head.num_pending = _closed(state.pending, int(head.pending_head), int(head.num_pending), slot)


def _closed(ring: np.ndarray, head: int, length: int, slot: int) -> int:
    """Close the gap that a slot leaves in a ring; return how many are left."""
    places = (head + np.arange(length)) % len(ring)
    kept = [one for one in ring[places] if one != slot]
    ring[places[: len(kept)]] = kept
    return len(kept)


def promoted(engine: Engine, slot: int, num_produced: int) -> None:
    """Have a request run with so many tokens produced and all before them computed; no step may be under way."""
    state = engine.state
    head, row = state.engine[0], state.requests[slot]
    if row.status != RUNNING:
        taken_out(engine, slot)
        if row.status in (UNBORN, WAITING, FINISHED):
            state.running[head.num_running] = slot
            head.num_running += 1
        row.status = RUNNING
        row.prefill_tokens = row.prompt_tokens + row.output_tokens
    # where it has more tokens than fit the model, its prompt was estimated too long
    num_produced = min(num_produced, engine.config.max_model_len - 2)
    row.prompt_tokens = min(row.prompt_tokens, engine.config.max_model_len - num_produced - 1)
    row.output_tokens = num_produced
    row.placeholders = row.stale_tokens = 0
    row.computed_tokens = row.prompt_tokens + num_produced - 1 if num_produced else 0
    row.num_blocks = -(-row.computed_tokens // engine.config.block_size)
    if row.final_tokens <= num_produced:  # it goes on, whatever was known of its end
        row.final_tokens = min(num_produced + MORE_TOKENS, engine.config.max_model_len - row.prompt_tokens)
        row.max_tokens = max(row.max_tokens, row.final_tokens)
    row.scheduled_s = row.scheduled_s if row.scheduled_s >= 0 else head.now_s
    if num_produced and row.first_token_s < 0:
        row.first_token_s = head.now_s


def demoted(engine: Engine, slot: int) -> None:
    """Have a running request wait, before all others; no step may be under way."""
    state = engine.state
    head, row = state.engine[0], state.requests[slot]
    if row.status != RUNNING:
        return
    taken_out(engine, slot)
    row.status = WAITING
    row.computed_tokens = row.num_blocks = row.placeholders = row.stale_tokens = 0
    head.waiting_head = (int(head.waiting_head) - 1) % len(state.waiting)
    state.waiting[head.waiting_head] = slot
    head.num_waiting += 1
