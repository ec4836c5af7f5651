"""A plain reading of an engine's load as times, for engines whose steps take as long as `AFFINE` says."""

from __future__ import annotations

import math

import numpy as np

from predictor.config import EngineConfig
from predictor.state import State
from tests.strategies import AFFINE, affine_seconds, straight_lines


def load_by_hand(state: State, config: EngineConfig) -> dict[str, float]:
    """Compute the time of a step that decodes all requests, of their prefill by mean costs, and the shortest target."""
    head = state.engine[0]
    slots = [
        *state.running[: head.num_running],
        *(state.waiting[(head.waiting_head + place) % len(state.waiting)] for place in range(head.num_waiting)),
        *(state.pending[(head.pending_head + place) % len(state.pending)] for place in range(head.num_pending)),
    ]
    seats = config.max_num_seqs
    token_s = AFFINE.token_s if config.max_num_batched_tokens > 1 else 0.0
    sequence_s = (straight_lines(AFFINE.by_sequences, seats) - straight_lines(AFFINE.by_sequences, 0)) / seats
    contexts, prefill_s, targets = [], 0.0, []
    for slot in slots:
        request, target = state.requests[slot], float(state.facts[slot].tpot_slo_s)
        tokens, before = int(request.prompt_tokens) + int(request.output_tokens), int(request.computed_tokens)
        contexts.append(tokens)
        targets += [] if np.isnan(target) or has_missed(state, slot) else [target]
        left = tokens - before
        if left > 1:
            prefill_s += left * (token_s + AFFINE.prefill_token_s) + sequence_s
            prefill_s += AFFINE.prefill_qq_s * left**2 + AFFINE.prefill_qkv_s * left * before
    mean = sum(contexts) / max(1, len(contexts))
    decodes = [(1, mean, 1)] * min(len(slots), seats)
    return {
        "decode_step_s": affine_seconds(decodes) if decodes else 0.0,
        "queued_prefill_s": prefill_s,
        "least_tpot_slo_s": min(targets, default=math.inf),
    }


def has_missed(state: State, slot: int) -> bool:
    """Return whether a response cannot have all its tokens by their deadlines any more, by what is known now."""
    request, facts = state.requests[slot], state.facts[slot]
    num = int(request.output_tokens)
    next_due_s = request.arrival_s + facts.ttft_slo_s + (num * facts.tpot_slo_s if num else 0.0)
    return bool(0 <= request.tokens_on_time < num or next_due_s < state.engine[0].now_s)
