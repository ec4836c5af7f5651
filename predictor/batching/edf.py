"""Earliest deadline first: whose next token is due first goes first."""

from __future__ import annotations

from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

ETA, FROM_FIRST_TOKEN = range(2)  # the options


@kernel
def schedule(state: State) -> bool:
    """Fill the step by due times."""
    engine = state.engine[0]
    count = ordered_requests.list_requests(state, engine.options[FROM_FIRST_TOKEN] > 0)
    for place in range(count):
        rank = state.ranks[state.turns[place]]
        rank.key = rank.due_s
    return ordered.fill_seconds(state, count, engine.options[ETA])
