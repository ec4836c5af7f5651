"""SlideBatching (ProServe, Algorithm 1): urgent requests by density, then the others by deadline, in bounded time."""

from __future__ import annotations

import numpy as np

from predictor.batching import ordered
from predictor.compiled import kernel
from predictor.state import State

GAMMA, ETA, PHI, FIRST_TOKEN_WEIGHT, FROM_FIRST_TOKEN = range(5)  # the options
URGENT, NORMAL = range(2)


@kernel
def schedule(state: State) -> bool:
    """Fill the step (lines 13 to 19)."""
    count = ordered.list_requests(state, state.engine[0].options[FROM_FIRST_TOKEN] > 0)
    budget_s = time_budget_s(state, count)
    partition(state, count, budget_s)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = rank.due_s
        if rank.group == URGENT:
            rank.key = rank.cost_s / ordered.weight_of(state, slot, state.engine[0].options[FIRST_TOKEN_WEIGHT])
    engine = state.engine[0]
    steady = ordered.fill(state, count, engine.max_num_batched_tokens, budget_s, budget_s)
    if budget_s < np.inf:  # it shrinks to this as deadlines come nearer
        engine.steady_limit_s = engine.options[ETA] * ordered.shortest_tpot_s(state, count)
    return steady


@kernel
def time_budget_s(state: State, count: int) -> float:
    """Return the time until the first deadline, but at least η (lines 6 and 7); no limit where nobody has a TPOT."""
    engine = state.engine[0]
    first_s = np.inf
    for place in range(count):
        first_s = min(first_s, state.ranks[state.turns[place]].due_s)
    shortest = ordered.shortest_tpot_s(state, count)
    if shortest == np.inf:
        return np.inf
    return max(first_s - ordered.start_s(state), engine.options[ETA] * shortest)


@kernel
def partition(state: State, count: int, budget_s: float) -> None:
    """Set the groups: a request is urgent whose deadline is nearer than gamma · φ (lines 8 to 12).

    φ is the estimated time until all requests are served (φ_a, Eq. 8), or those up to this one (φ_c, Eq. 9).
    """
    engine = state.engine[0]
    factor = engine.options[GAMMA] * time_per_cost(state, budget_s)
    by_request, start_s = engine.options[PHI] > 0, ordered.start_s(state)
    total_s = 0.0
    for place in range(count):
        rank = state.ranks[state.turns[place]]
        rank.key = rank.due_s
        total_s += rank.cost_s
    if by_request:
        ordered.make_heap(state, count)
        total_s = 0.0
    for place in range(count):
        slot = ordered.pop(state, count - place) if by_request else state.turns[place]
        rank = state.ranks[slot]
        if by_request:
            total_s += rank.cost_s
        rank.group = URGENT if rank.due_s - start_s < factor * total_s else NORMAL


@kernel
def time_per_cost(state: State, budget_s: float) -> float:
    """Return how long steps of `budget_s` take for a second of requests, with the constant part of each step."""
    if budget_s == np.inf:
        return 1.0
    spent_s = budget_s - ordered.constant_s(state)
    return budget_s / spent_s if spent_s > 0 else np.inf
