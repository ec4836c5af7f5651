"""The requests of an engine in an order: what they need, what steps with them cost, and a heap by their ranks."""

from __future__ import annotations

import numpy as np

from predictor import estimator, queues, steps
from predictor.batching import vllm_v1
from predictor.compiled import kernel, small_kernel
from predictor.state import RUNNING, WAITING, State
from predictor.tabulated_costs import (
    CONSTANT,
    LEAST_PREFILL,
    PREFILL_KV,
    PREFILL_QKV,
    PREFILL_QQ,
    PREFILL_TOKEN,
    SAMPLED,
    interpolated_prefill_s,
    mean_context_line,
)

LEFT_OUT_S = -1.0  # the cost of a request that the planned step preempts, or can neither serve nor preempt


@kernel
def list_requests(state: State, from_first_token: bool) -> int:
    """Enter all running and waiting requests into `turns`, all with the same rank; return their number.

    Due times are those of `due_s`, costs are 0. Requests that only wait for their output in flight are left out.
    """
    engine = state.engine[0]
    engine.belief = estimator.belief(engine)
    count = 0
    for place in range(engine.num_running + engine.num_waiting):
        if place < engine.num_running:
            slot = state.running[place]
        else:
            slot = queues.waiting_at(state, place - engine.num_running)
        rank = state.ranks[slot]
        if engine.pipeline_depth > 1 and awaits_output(state, slot):
            rank.cost_s = LEFT_OUT_S
            continue
        state.turns[count] = slot
        count += 1
        rank.group, rank.key, rank.cost_s = 0, 0.0, 0.0
        rank.due_s = due_s(state, slot, from_first_token)
    return count


@kernel
def list_with_costs(state: State, from_first_token: bool) -> int:
    """Do as `list_requests`, with the seconds that a step would take for what is left of each request."""
    count = list_requests(state, from_first_token)
    belief = state.engine[0].belief
    token_s, sequence_s, decode_s, context_s = unit_costs_s(state)
    for place in range(count):
        slot = state.turns[place]
        before = state.requests[slot].computed_tokens
        num_tokens = float(steps.tokens_of(state, slot) - before)
        if is_decode(state, slot):
            state.ranks[slot].cost_s = belief * (token_s + sequence_s + decode_s + context_s * (before + 1))
        else:
            prefill = token_s * num_tokens + sequence_s + prefill_s(state, num_tokens, before)
            state.ranks[slot].cost_s = belief * prefill
    return count


@small_kernel
def awaits_output(state: State, slot: int) -> bool:
    """Return whether a request cannot be scheduled before its output in flight is known (async scheduling)."""
    request = state.requests[slot]
    if request.status == WAITING:
        return bool(request.stale_tokens > 0)
    return bool(
        request.computed_tokens >= steps.tokens_of(state, slot)
        or request.computed_tokens + 1 >= state.engine[0].max_model_len
        or vllm_v1.is_ending(state, slot)
    )


@small_kernel
def start_s(state: State) -> float:
    """Return when the planned step starts: now, or when the step in flight ends."""
    engine = state.engine[0]
    return max(engine.now_s, state.steps[engine.oldest].end_s) if engine.num_in_flight > 0 else engine.now_s


@small_kernel
def num_produced(state: State, slot: int) -> int:
    """Return the tokens of a response so far, those in flight included."""
    return state.requests[slot].output_tokens + state.requests[slot].placeholders


@small_kernel
def is_decode(state: State, slot: int) -> bool:
    """Return whether a request has a token to compute and no more, the last one of its response so far."""
    request = state.requests[slot]
    return (
        request.status == RUNNING
        and num_produced(state, slot) > 0
        and steps.tokens_of(state, slot) == request.computed_tokens + 1
    )


@small_kernel
def due_s(state: State, slot: int, from_first_token: bool) -> float:
    """Return when the next token is due, token i at arrival + TTFT + (i - 1) · TPOT; infinity without targets.

    With `from_first_token` a first token that came early brings the others forward (ProServe §2, footnote 2).
    """
    request, facts = state.requests[slot], state.facts[slot]
    due = request.arrival_s + facts.ttft_slo_s
    produced = num_produced(state, slot)
    if produced > 0:
        if from_first_token and 0 <= request.first_token_s < due:
            due = request.first_token_s
        due += produced * facts.tpot_slo_s
    return np.inf if np.isnan(due) else due


@small_kernel
def unit_costs_s(state: State) -> tuple[float, float, float, float]:
    """Return the seconds that a token, a sequence, a decode and a token of its context add to a full step.

    A step time is not linear in them, so this is its mean slope up to the engine's limits (ProServe §4.1 fits one).
    """
    engine, costs = state.engine[0], state.costs
    most_tokens, most_sequences = engine.max_num_batched_tokens, engine.max_num_seqs
    token_s = (costs.by_tokens[most_tokens] - costs.by_tokens[1]) / max(1, most_tokens - 1)
    sequence_s = (costs.by_count[most_sequences, SAMPLED] - costs.by_count[0, SAMPLED]) / most_sequences
    base_s, context_s = mean_context_line(costs, most_sequences)
    return token_s, sequence_s, base_s / most_sequences, context_s


@small_kernel
def decode_cost_s(state: State, context: float) -> float:
    """Return the seconds that a decode with `context` tokens adds to a full step."""
    token_s, sequence_s, decode_s, context_s = unit_costs_s(state)
    return state.engine[0].belief * (token_s + sequence_s + decode_s + context_s * context)


@small_kernel
def prefill_s(state: State, num_tokens: float, before: int) -> float:
    """Return the attention's part of a prefill of `num_tokens` tokens behind `before` others."""
    coefficients = state.costs.coefficients
    seconds = coefficients[PREFILL_TOKEN] * num_tokens + coefficients[PREFILL_QQ] * num_tokens * num_tokens
    seconds += coefficients[PREFILL_QKV] * num_tokens * before + coefficients[PREFILL_KV] * before
    interpolated_s = interpolated_prefill_s(state.costs, num_tokens, num_tokens * num_tokens, num_tokens * before)
    return seconds + max(0.0, interpolated_s - coefficients[LEAST_PREFILL])


@small_kernel
def constant_s(state: State) -> float:
    """Return the seconds of a step that do not depend on its requests."""
    costs = state.costs
    return state.engine[0].belief * (costs.coefficients[CONSTANT] + costs.by_tokens[1] + costs.by_count[0, SAMPLED])


@kernel
def shortest_tpot_s(state: State, count: int) -> float:
    """Return the shortest target for the time per token; infinity where no request has one."""
    shortest = np.inf
    for place in range(count):
        target = state.facts[state.turns[place]].tpot_slo_s
        if not np.isnan(target):
            shortest = min(shortest, target)
    return shortest


@small_kernel
def limit_s(state: State, count: int, share: float) -> float:
    """Return a share of the shortest TPOT target, a limit of a step; infinity for a share of 0 or without targets."""
    shortest = shortest_tpot_s(state, count)
    return share * shortest if share > 0 and shortest < np.inf else np.inf


@small_kernel
def weight_of(state: State, slot: int, first_token_weight: float) -> float:
    """Return the gain of the next token: the request's weight, multiplied for the first (w_p / w_d of ProServe §2)."""
    weight = state.facts[slot].weight
    return weight * first_token_weight if num_produced(state, slot) == 0 else weight


# The order: `turns` as a heap, since most of a long queue is never reached.


@small_kernel
def goes_before(state: State, slot: int, other: int) -> bool:
    """Order by rank, then due time, then as the engine orders its queue."""
    return _goes_before(state.ranks, state.requests, bool(state.engine[0].by_priority), slot, other)


@small_kernel
def _goes_before(ranks: np.ndarray, requests: np.ndarray, by_priority: bool, slot: int, other: int) -> bool:
    a, b = ranks[slot], ranks[other]
    if a.group != b.group:
        return bool(a.group < b.group)
    if a.key != b.key:
        return bool(a.key < b.key)
    if a.due_s != b.due_s:
        return bool(a.due_s < b.due_s)
    one, two = requests[slot], requests[other]
    if by_priority and one.priority != two.priority:
        return bool(one.priority < two.priority)
    if one.arrival_s != two.arrival_s:
        return bool(one.arrival_s < two.arrival_s)
    return bool(one.tie_break < two.tie_break)


@kernel
def _sift_down(
    heap: np.ndarray, ranks: np.ndarray, requests: np.ndarray, by_priority: bool, place: int, count: int
) -> None:
    """Move a request of the heap down to where it belongs."""
    slot = heap[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and _goes_before(ranks, requests, by_priority, heap[child + 1], heap[child]):
            child += 1
        if not _goes_before(ranks, requests, by_priority, heap[child], slot):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = slot


@small_kernel
def make_heap(state: State, count: int) -> None:
    """Turn the first `count` requests of `turns` into a heap."""
    by_priority = bool(state.engine[0].by_priority)
    for place in range(count // 2 - 1, -1, -1):
        _sift_down(state.turns, state.ranks, state.requests, by_priority, place, count)


@small_kernel
def pop(state: State, count: int) -> int:
    """Return the first of the `count` requests in the heap; it moves behind the others."""
    slot = state.turns[0]
    state.turns[0] = state.turns[count - 1]
    state.turns[count - 1] = slot
    if count > 2:
        _sift_down(state.turns, state.ranks, state.requests, bool(state.engine[0].by_priority), 0, count - 1)
    return int(slot)
