"""All decodes, then prefills by deadline, as much as lets the step end before the first deadline of a decode.

What is late already has no deadline to keep: a decode does not shorten the step, and a prefill comes after the others.
"""

from __future__ import annotations

import numpy as np

from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import NEVER, State

(FROM_FIRST_TOKEN,) = range(1)  # the options


@kernel
def schedule(state: State) -> bool:
    """Fill the step."""
    engine = state.engine[0]
    count = ordered_requests.list_requests(state, engine.options[FROM_FIRST_TOKEN] > 0)
    start_s, seconds = ordered_requests.start_s(state), np.inf
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = rank.due_s
        if not ordered_requests.is_decode(state, slot):
            rank.group = 1 if rank.due_s >= start_s else 2
        elif rank.due_s >= start_s:
            seconds = min(seconds, rank.due_s - start_s)
    if engine.stops != NEVER:  # which deadlines are kept does not depend on the order of decodes
        return ordered.fill_behind_decodes(state, count, engine.max_num_batched_tokens, seconds)
    return ordered.fill(state, count, engine.max_num_batched_tokens, np.inf, seconds)
