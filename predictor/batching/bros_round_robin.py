"""Round robin (BROS §2.2): a step of real-time requests, then one of best effort, each in order of arrival."""

from __future__ import annotations

import numpy as np

from predictor import steps
from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

(TURN,) = range(1)  # what it remembers: the class whose turn it is
NUM_CLASSES = 2


@kernel
def schedule(state: State) -> bool:
    """Fill the step with the class whose turn it is, or with the other where no request of that one can run."""
    engine = state.engine[0]
    most_tokens = engine.max_num_batched_tokens
    step = state.steps[steps.current(state)]
    turn = int(engine.memory[TURN])
    count = ordered_requests.list_with_costs(state, False)
    own = keep_class(state, count, turn)
    if own in (0, count):
        count = ordered_requests.list_with_costs(state, False)
        keep_class(state, count, turn if own > 0 else NUM_CLASSES - 1 - turn)
        return ordered.fill(state, count, most_tokens, np.inf, np.inf)
    steps.clear_sums(step)
    ordered.plan(state, own, 0, most_tokens, np.inf, np.inf)
    if step.num_scheduled == 0 and step.num_preempted == 0:
        turn = NUM_CLASSES - 1 - turn
        own = keep_class(state, ordered_requests.list_with_costs(state, False), turn)
        ordered.plan(state, own, 0, most_tokens, np.inf, np.inf)
    ordered.carry_out(state)
    engine.memory[TURN] = NUM_CLASSES - 1 - turn
    return False


@kernel
def keep_class(state: State, count: int, request_class: int) -> int:
    """Keep the listed requests of a class; return their number. The others come after them in the order."""
    own = 0
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = state.requests[slot].arrival_s
        rank.group = int(state.facts[slot].request_class != request_class)
        if rank.group == 0:
            state.turns[own] = slot
            own += 1
    return own
