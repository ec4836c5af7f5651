"""FairBatching as ProServe compares with it: decodes that are nearly due, then prefills, then the other decodes.

Our reading: each group goes by due time. A decode is nearly due where two steps of the shortest TPOT target would make
it late. A step lasts until the first of these decodes is due, and until another one could still be on time in a further
step of that length; but at least `eta` times the target. Without decodes it has no limit in time.
"""

from __future__ import annotations

import numpy as np

from predictor.batching import ordered, ordered_requests
from predictor.compiled import kernel
from predictor.state import State

ETA, FROM_FIRST_TOKEN = range(2)  # the options
NEARLY_DUE, PREFILL, OTHER = range(3)
TWO_STEPS = 2 - 1e-6  # rounding has no effect where one target is twice another


@kernel
def schedule(state: State) -> bool:
    """Fill the step by groups, then due times."""
    engine = state.engine[0]
    count = ordered_requests.list_requests(state, engine.options[FROM_FIRST_TOKEN] > 0)
    step_s = ordered_requests.shortest_tpot_s(state, count)
    seconds, start_s = np.inf, ordered_requests.start_s(state)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        rank.key = rank.due_s
        rank.group = PREFILL
        if ordered_requests.is_decode(state, slot):
            slack_s = rank.due_s - start_s
            rank.group = NEARLY_DUE if slack_s < TWO_STEPS * step_s < np.inf else OTHER
            if slack_s < np.inf:
                seconds = min(seconds, slack_s if rank.group == NEARLY_DUE else slack_s - step_s)
    least_s = engine.options[ETA] * step_s if step_s < np.inf else np.inf
    seconds = max(seconds, least_s)
    steady = ordered.fill(state, count, engine.max_num_batched_tokens, seconds, seconds)
    engine.steady_limit_s = least_s  # the limit shrinks to this as deadlines come nearer
    return steady
