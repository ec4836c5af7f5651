"""Shortest job first: decodes, then the prefills with the fewest tokens left, cached prefixes not considered."""

from __future__ import annotations

from predictor import steps
from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

(ETA,) = range(1)  # the options


@kernel
def schedule(state: State) -> bool:
    """Fill the step by remaining prefills."""
    engine = state.engine[0]
    count = ordered_requests.list_requests(state, False)
    for place in range(count):
        slot = state.turns[place]
        if not ordered_requests.is_decode(state, slot):
            state.ranks[slot].key = float(steps.tokens_of(state, slot) - state.requests[slot].computed_tokens)
    return ordered.fill_seconds(state, count, engine.options[ETA])
