"""Highest density first: the weight of the next token per second that it costs, in steps of bounded time."""

from __future__ import annotations

from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

ETA, FIRST_TOKEN_WEIGHT = range(2)  # the options


@kernel
def schedule(state: State) -> bool:
    """Fill the step by densities."""
    engine = state.engine[0]
    count = ordered_requests.list_with_costs(state, False)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = rank.cost_s / ordered_requests.weight_of(state, slot, engine.options[FIRST_TOKEN_WEIGHT])
    return ordered.fill_seconds(state, count, engine.options[ETA])
