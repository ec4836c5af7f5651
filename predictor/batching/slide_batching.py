"""SlideBatching (ProServe, Algorithm 1): urgent requests by density, then the others by deadline, in bounded time.

Options turn it into the ablations of Figure 15: only by deadline, only by density, and without the estimator. Without
it, a request costs as much as it has tokens, a step has a token budget instead of a time budget, and the load is
estimated as if a full step lasted one TPOT.
"""

from __future__ import annotations

import numpy as np

from predictor import steps
from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

# the options
GAMMA, ETA, PHI, FIRST_TOKEN_WEIGHT, FROM_FIRST_TOKEN, ORDER, ETA_MAX, SKIP_OVERDUE, ESTIMATOR, TOKEN_BUDGET = range(10)
URGENT, NORMAL = range(2)
NEVER = 1e18  # a time beyond all deadlines; finite, so that no load is no time
BY_DEADLINE, BY_DENSITY = 1, 2  # values of ORDER; 0: urgent requests by density, the others by deadline
UP_TO_EACH, ONE_BY_ONE = 1, 2  # values of PHI; 0: the whole queue


@kernel
def schedule(state: State) -> bool:
    """Fill the step (lines 13 to 19)."""
    engine = state.engine[0]
    count, budget_s = list_by_urgency(state)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = rank.due_s
        if rank.group == URGENT:
            rank.key = rank.cost_s / ordered_requests.weight_of(state, slot, engine.options[FIRST_TOKEN_WEIGHT])
    num_tokens = ordered.token_limit(state, engine.options[TOKEN_BUDGET])
    shortest_s = ordered_requests.shortest_tpot_s(state, count)  # `fill` overwrites the list
    steady = ordered.fill(state, count, num_tokens, budget_s, budget_s)
    if budget_s < np.inf:  # it shrinks to this as deadlines come nearer
        engine.steady_limit_s = engine.options[ETA] * shortest_s
    return steady


@kernel
def list_by_urgency(state: State) -> tuple[int, float]:
    """List all requests, urgent or normal; return their number, and the time budget of a step."""
    engine = state.engine[0]
    count, budget_s = ordered_requests.list_with_costs(state, engine.options[FROM_FIRST_TOKEN] > 0), np.inf
    if engine.options[ESTIMATOR] > 0:
        budget_s = time_budget_s(state, count)
    else:
        count_tokens(state, count)
    partition(state, count, budget_s)
    return count, budget_s


@kernel
def time_budget_s(state: State, count: int) -> float:
    """Return the time until the first deadline, but at least η (lines 6 and 7); no limit where none has a TPOT."""
    engine = state.engine[0]
    first_s, start_s = np.inf, ordered_requests.start_s(state)
    for place in range(count):
        due_s = state.ranks[state.turns[place]].due_s
        if due_s >= start_s or engine.options[SKIP_OVERDUE] == 0:
            first_s = min(first_s, due_s)
    shortest = ordered_requests.shortest_tpot_s(state, count)
    if shortest == np.inf:
        return np.inf
    budget_s = first_s - start_s
    if engine.options[ETA_MAX] > 0:
        budget_s = min(budget_s, engine.options[ETA_MAX] * shortest)
    return max(budget_s, engine.options[ETA] * shortest)


@kernel
def count_tokens(state: State, count: int) -> None:
    """Set the cost of each request to its number of tokens left."""
    for place in range(count):
        slot = state.turns[place]
        state.ranks[slot].cost_s = float(steps.tokens_of(state, slot) - state.requests[slot].computed_tokens)


@kernel
def partition(state: State, count: int, budget_s: float) -> None:
    """Set the groups: a request is urgent whose deadline is nearer than gamma · φ (lines 8 to 12).

    φ is the estimated time until all requests are served (φ_a, Eq. 8), until those up to this one are (φ_c, Eq. 9), or
    until all are, one in each step (φ_p, for engines that only prefill).
    """
    engine = state.engine[0]
    if engine.options[ORDER] > 0:
        for place in range(count):
            state.ranks[state.turns[place]].group = NORMAL if engine.options[ORDER] == BY_DEADLINE else URGENT
        return
    by_request, start_s = engine.options[PHI] == UP_TO_EACH, ordered_requests.start_s(state)
    factor, total_s = engine.options[GAMMA], 0.0
    if engine.options[ESTIMATOR] == 0:
        factor *= seconds_per_token(state, count)
    elif engine.options[PHI] == ONE_BY_ONE:
        total_s = count * ordered_requests.constant_s(state)
    else:
        factor *= time_per_cost(state, budget_s)
    for place in range(count):
        rank = state.ranks[state.turns[place]]
        rank.key = rank.due_s
        total_s += rank.cost_s
    if by_request:
        ordered_requests.make_heap(state, count)
        total_s = 0.0
    for place in range(count):
        slot = ordered_requests.pop(state, count - place) if by_request else state.turns[place]
        rank = state.ranks[slot]
        if by_request:
            total_s += rank.cost_s
        rank.group = URGENT if rank.due_s - start_s < factor * total_s else NORMAL


@kernel
def time_per_cost(state: State, budget_s: float) -> float:
    """Return how long steps of `budget_s` take for a second of requests, with the constant part of each step."""
    if budget_s == np.inf:
        return 1.0
    spent_s = budget_s - ordered_requests.constant_s(state)
    return budget_s / spent_s if spent_s > 0 else NEVER


@kernel
def seconds_per_token(state: State, count: int) -> float:
    """Return the seconds of a token where a full step lasts the shortest TPOT target; 0 without such targets."""
    shortest = ordered_requests.shortest_tpot_s(state, count)
    if shortest == np.inf:
        return 0.0
    return shortest / ordered.token_limit(state, state.engine[0].options[TOKEN_BUDGET])
