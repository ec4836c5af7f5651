"""Sarathi's chunked prefill as ProServe compares with it: decodes, then prefills in order of arrival."""

from __future__ import annotations

from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

(TOKEN_BUDGET,) = range(1)  # the options


@kernel
def schedule(state: State) -> bool:
    """Fill the step in order of arrival."""
    count = ordered_requests.list_requests(state, False)
    for place in range(count):
        slot = state.turns[place]
        state.ranks[slot].group = 0 if ordered_requests.is_decode(state, slot) else 1
        state.ranks[slot].key = state.requests[slot].arrival_s
    return ordered.fill_tokens(state, count, state.engine[0].options[TOKEN_BUDGET])
