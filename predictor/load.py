"""The load of an engine as times by its profile, and the shortest target that a request there can still attain.

`efficient_step_s` is the shortest TPOT target whose requests gain hardly anything from instances of their own. A step
with n decodes, and as many prompt tokens as requests need for n decodes on average, costs each of them its time over n.
That falls while weights and constants are shared by more requests, until computing limits it. On the other hand, fewer
requests at a time vary more: instances that serve only some of them need more room, about 1 over the square root of n
of their time; where requests differ, n is that of equal ones that vary as much. `POOLING` was chosen by simulations
with and without tiers.

`step_overhead_s` is how much longer such a step takes than its requests would in the best step, as so few share weights
and constants (by a step with half the requests of the best one, if that has fewer). A step of L costs each of them
about L / (L - overhead) times what the best one does.

`prefill_token_s` is what a token of a full chunk costs, at the start of a prompt: what a cached one saves.
"""

from __future__ import annotations

import numpy as np

from predictor import steps
from predictor.batching import ordered_requests
from predictor.compiled import kernel, small_kernel
from predictor.state import NO_TRANSFER, State
from predictor.step_time import DECODE_REGION, PREFILL_REGION
from predictor.tabulated_costs import Costs, step_seconds

# the indicators that `shown` returns
LOAD = (
    "decode_step_s",
    "queued_prefill_s",
    "least_tpot_slo_s",
    "efficient_step_s",
    "step_overhead_s",
    "prefill_token_s",
)
# requests, their context, the longest one, seconds of prefill, shortest target, tokens of prompts, those of them that
# are computed, tokens of responses, and the squares of the tokens of prompt and response
NONE_YET = (0.0, 0.0, 0.0, 0.0, np.inf, 0.0, 0.0, 0.0, 0.0)
EFFICIENT = 0.03  # above the least cost of a request, as a share
POOLING = 0.45  # the same, times the square root of the number of decodes in a step
MORE = 1.5  # factor between the numbers of decodes that are compared
MIN_REQUESTS = 16  # fewer have no typical lengths

Sums = tuple[float, float, float, float, float, float, float, float, float]


@kernel
def added(state: State, slot: int, sums: Sums) -> Sums:
    """Add a request that runs, waits or is reserved."""
    num, context, longest, prefill_s, tpot_s, prompts, computed, responses, squares = sums
    request = state.requests[slot]
    tokens = float(request.prompt_tokens + request.output_tokens)
    left = tokens - request.computed_tokens
    if left > 1 and request.stage == NO_TRANSFER:
        token_s, sequence_s, _, _ = ordered_requests.unit_costs_s(state)
        prefill_s += token_s * left + sequence_s + ordered_requests.prefill_s(state, left, request.computed_tokens)
    if not is_missed(state, slot):
        target_s = state.facts[slot].tpot_slo_s
        tpot_s = min(tpot_s, target_s)  # in this order: NaN is no target
    prompts += request.prompt_tokens
    computed += max(0, request.prompt_tokens - request.hit_tokens)
    responses += request.expected_tokens
    squares += float(request.prompt_tokens + request.expected_tokens) ** 2
    return num + 1.0, context + tokens, max(longest, tokens), prefill_s, tpot_s, prompts, computed, responses, squares


@small_kernel
def is_missed(state: State, slot: int) -> bool:
    """Return whether a request has missed a deadline, or its next token is late already."""
    request = state.requests[slot]
    if 0 <= request.tokens_on_time < request.output_tokens:
        return True
    return steps.due_s(state, slot, request.output_tokens + 1) < state.engine[0].now_s  # NaN without a deadline


@small_kernel
def shown(state: State, sums: Sums) -> tuple[float, float, float, float, float, float]:
    """Return the indicators, in the order of LOAD; of more requests than there are seats, so many mean ones decode."""
    all_requests, all_context, longest, prefill_s, tpot_s, prompts, computed, responses, squares = sums
    engine = state.engine[0]
    num = int(min(all_requests, float(engine.max_num_seqs)))
    step_s = 0.0
    if num > 0:
        context = num * (all_context / all_requests + 1.0)
        pace = engine.pace * engine.region_pace[DECODE_REGION]
        step_s = pace * step_seconds(state.costs, num, num, num, context, 0, 0.0, 0.0, longest + 1.0)
    efficient_s = overhead_s = np.inf
    if tpot_s < np.inf and all_requests >= MIN_REQUESTS and responses > all_requests:
        room = float(engine.num_blocks * engine.block_size)
        efficient_s, overhead_s = _efficient_step(
            state.costs, engine.max_num_seqs, engine.max_num_batched_tokens, room,
            computed / responses, (prompts + responses / 2) / all_requests,
            (prompts + responses) ** 2 / (all_requests * squares),
        )  # fmt: skip
        efficient_s, overhead_s = engine.pace * efficient_s, engine.pace * overhead_s
    pace = engine.pace * engine.region_pace[PREFILL_REGION]
    chunk = float(engine.max_num_batched_tokens)
    token_s = ordered_requests.unit_costs_s(state)[0] + ordered_requests.prefill_s(state, chunk, 0) / chunk
    return step_s, pace * prefill_s, tpot_s, efficient_s, overhead_s, pace * token_s


@kernel
def _efficient_step(
    costs: Costs,
    max_num_seqs: int,
    max_num_tokens: int,
    room: float,
    prompt_share: float,
    context: float,
    evenness: float,
) -> tuple[float, float]:
    """Return the time of the shortest efficient step, and the overhead; a decode comes with `prompt_share` tokens.

    `evenness` is 1 where requests are equal; else, so large a share of them, being equal, would vary as much.
    """
    most = int(max(1.0, min(float(max_num_seqs), max_num_tokens / (1.0 + prompt_share), room / max(1.0, context))))
    num, best = most, most
    least_s = _seconds_with(costs, most, prompt_share, context) / most
    while num > 1:
        num = int(num / MORE)
        cost_s = _seconds_with(costs, num, prompt_share, context) / num
        if cost_s < least_s:
            least_s, best = cost_s, num
    few, enough = 0, best
    while enough - few > 1:
        middle = (few + enough) // 2
        allowed = 1.0 + max(EFFICIENT, POOLING / np.sqrt(evenness * middle))
        if _seconds_with(costs, middle, prompt_share, context) <= allowed * least_s * middle:
            enough = middle
        else:
            few = middle
    fewer = min(enough, max(1, best // 2))
    overhead_s = _seconds_with(costs, fewer, prompt_share, context) - fewer * least_s
    return _seconds_with(costs, enough, prompt_share, context), max(0.0, overhead_s)


@small_kernel
def _seconds_with(costs: Costs, num: int, prompt_share: float, context: float) -> float:
    """Return the time of a step with `num` decodes and their share of prompts; that of a prompt is half computed."""
    prompt_tokens = int(num * prompt_share)
    return step_seconds(
        costs, num + prompt_tokens, num, num, num * context, min(1, prompt_tokens),
        float(prompt_tokens) * prompt_tokens, 0.5 * prompt_tokens * context, 0.0,
    )  # fmt: skip
