"""Steps filled in an order over all requests, within seconds as well as tokens, seats and KV blocks.

A rule lists all requests with `list_requests`, gives each a rank (`state.RANK`), and calls `fill`, which plans the step
in that order and then carries it out in the order of vLLM's own loop: preemptions, running requests, admissions. So a
plan can also be carried out by a real vLLM. Memory is managed as in vLLM v1 (prefix hits, preemption by recompute).
"""

from __future__ import annotations

import numpy as np

from predictor import blocks, estimator, queues, steps
from predictor.batching import vllm_v1
from predictor.compiled import kernel, small_kernel
from predictor.state import RUNNING, WAITING, State
from predictor.step_time import (
    CONSTANT,
    LEAST_PREFILL,
    PREFILL_KV,
    PREFILL_QKV,
    PREFILL_QQ,
    PREFILL_TOKEN,
    SAMPLED,
    interpolated_prefill_s,
    mean_context_line,
    step_seconds,
)

LEFT_OUT_S = -1.0  # the cost of a request that the planned step preempts, or can neither serve nor preempt

# Facts about the queue, for the rules.


@kernel
def list_requests(state: State, from_first_token: bool) -> int:
    """Enter all running and waiting requests into `turns`, all with the same rank; return their number.

    Due times are those of `due_s`. Requests that only wait for their output in flight are left out.
    """
    engine = state.engine[0]
    engine.belief = estimator.belief(engine)
    token_s, sequence_s, decode_s, context_s = unit_costs_s(state)
    count = 0
    for place in range(engine.num_running + engine.num_waiting):
        if place < engine.num_running:
            slot = state.running[place]
        else:
            slot = queues.waiting_at(state, place - engine.num_running)
        if engine.pipeline_depth > 1 and awaits_output(state, slot):
            state.ranks[slot].cost_s = LEFT_OUT_S
            continue
        state.turns[count] = slot
        count += 1
        rank = state.ranks[slot]
        rank.group, rank.key = 0, 0.0
        rank.due_s = due_s(state, slot, from_first_token)
        before = state.requests[slot].computed_tokens
        num_tokens = float(steps.tokens_of(state, slot) - before)
        if is_decode(state, slot):
            rank.cost_s = engine.belief * (token_s + sequence_s + decode_s + context_s * (before + 1))
        else:
            rank.cost_s = engine.belief * (token_s * num_tokens + sequence_s + prefill_s(state, num_tokens, before))
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
    a, b = state.ranks[slot], state.ranks[other]
    if a.group != b.group:
        return a.group < b.group
    if a.key != b.key:
        return a.key < b.key
    if a.due_s != b.due_s:
        return a.due_s < b.due_s
    one, two = state.requests[slot], state.requests[other]
    if state.engine[0].by_priority and one.priority != two.priority:
        return one.priority < two.priority
    if one.arrival_s != two.arrival_s:
        return one.arrival_s < two.arrival_s
    return one.tie_break < two.tie_break


@kernel
def sift_down(state: State, place: int, count: int) -> None:
    """Move a request of the heap down to where it belongs."""
    heap = state.turns
    slot = heap[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and goes_before(state, heap[child + 1], heap[child]):
            child += 1
        if not goes_before(state, heap[child], slot):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = slot


@kernel
def make_heap(state: State, count: int) -> None:
    """Turn the first `count` requests of `turns` into a heap."""
    for place in range(count // 2 - 1, -1, -1):
        sift_down(state, place, count)


@kernel
def pop(state: State, count: int) -> int:
    """Return the first of the `count` requests in the heap; it moves behind the others."""
    slot = state.turns[0]
    state.turns[0] = state.turns[count - 1]
    state.turns[count - 1] = slot
    if count > 2:
        sift_down(state, 0, count - 1)
    return slot


# The step.


@kernel
def fill(state: State, count: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float) -> bool:
    """Fill the step with the `count` listed requests in the order of their ranks.

    A request gets its decode, or the largest chunk of its prefill with which the step stays within `num_tokens` tokens
    and the limit in seconds for requests of its kind; the step ends at the first that gets less than the whole. The
    first one gets a token at least. Where blocks are short the last running request in the order is preempted;
    admissions end in a step that preempts, and at the first request that does not fit. A running request that is left
    out keeps its blocks. Returns whether the next step will decode all running requests, if none ends or arrives.
    """
    return fill_behind(state, count, 0, num_tokens, decode_limit_s, prefill_limit_s)


@kernel
def fill_behind_decodes(state: State, count: int, num_tokens: int, prefill_limit_s: float) -> bool:
    """Fill the step as `fill` does where all decodes come first, without a limit in seconds; they need no order."""
    num_decodes = num_blocks = 0
    place = 0
    while place < count - num_decodes:
        slot = state.turns[place]
        if not is_decode(state, slot):
            place += 1
            continue
        num_decodes += 1
        num_blocks += not blocks.has_room(state, slot, state.requests[slot].computed_tokens + 1)
        state.turns[place] = state.turns[count - num_decodes]
        state.turns[count - num_decodes] = slot
    if num_decodes > num_tokens or num_blocks > state.engine[0].num_free_blocks:
        num_decodes = 0
    return fill_behind(state, count, num_decodes, num_tokens, np.inf, prefill_limit_s)


@kernel
def fill_behind(
    state: State, count: int, num_first: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float
) -> bool:
    """Fill the step as `fill` does; the last `num_first` of the list are decodes that fit, and come first."""
    engine = state.engine[0]
    steps.clear_sums(state.steps[steps.current(state)])
    if can_decode_all(state, num_tokens, decode_limit_s):
        engine.steady_limit_s = decode_limit_s
        return decode_all(state) and estimator.is_constant(engine)
    num_free_blocks = engine.num_free_blocks
    add_decodes(state, count, num_first)
    plan(state, count - num_first, num_first, num_tokens - num_first, decode_limit_s, prefill_limit_s)
    engine.num_free_blocks = num_free_blocks
    if not engine.plans_only:
        carry_out(state)
    engine.steady_limit_s = decode_limit_s
    return will_decode_all(state, num_tokens) and estimator.is_constant(engine)


@kernel
def add_decodes(state: State, count: int, num_first: int) -> None:
    """Add the last `num_first` of the list to the step, which are decodes that fit."""
    for place in range(count - num_first, count):
        slot = state.turns[place]
        before = state.requests[slot].computed_tokens
        state.engine[0].num_free_blocks -= not blocks.has_room(state, slot, before + 1)
        add(state, slot, before, 1)


@kernel
def plan(
    state: State, count: int, num_seen: int, num_tokens: int, decode_limit_s: float, prefill_limit_s: float
) -> None:
    """Choose the step's requests, their tokens, and the ones to preempt; queues and blocks stay as they are.

    `num_seen` running requests are in the step already.
    """
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    num_running, num_free_blocks = engine.num_running, engine.num_free_blocks
    threshold = engine.long_prefill_token_threshold if num_running + engine.num_waiting > 1 else 0
    make_heap(state, count)
    admits = True
    while count > 0 and num_tokens > 0:
        joins = admits and step.num_preempted == 0 and engine.num_running < engine.max_num_seqs
        if not joins and num_seen == engine.num_running:
            break
        slot = pop(state, count)
        count -= 1
        runs = state.requests[slot].status == RUNNING
        num_seen += runs
        if (runs and state.ranks[slot].cost_s == LEFT_OUT_S) or (not runs and not joins):
            continue
        num_hits = 0 if runs else blocks.find_hits(state, slot)
        before = state.requests[slot].computed_tokens
        if not runs:
            before = queues.computed_before(state, slot, num_hits * engine.block_size)
        wanted = steps.tokens_of(state, slot) - before
        most = min(wanted, num_tokens)
        if 0 < threshold < most:
            most = threshold
        seconds = decode_limit_s if is_decode(state, slot) else prefill_limit_s
        chunk = largest_chunk(state, before, wanted, most, seconds)
        if chunk == 0:
            if step.num_scheduled > 0:
                break
            chunk = 1
        held = state.requests[slot].num_blocks
        if runs:
            if not make_room(state, slot, before + chunk):
                continue
        else:
            admits = vllm_v1.fits(state, slot, num_hits, before + chunk)
            if not admits:
                continue
            held = num_hits - blocks.count_idle(state, slot, num_hits)
            state.running[engine.num_running] = slot  # until the end of the plan
            engine.num_running += 1
            num_seen += 1
        engine.num_free_blocks -= max(0, blocks.blocks_for(before + chunk, engine.block_size) - held)
        add(state, slot, before, chunk)
        num_tokens -= chunk
        if chunk < most:
            break
    engine.num_running, engine.num_free_blocks = num_running, num_free_blocks


@kernel
def carry_out(state: State) -> None:
    """Carry out the plan in vLLM's order: preemptions, running requests, admissions.

    An admission finds its prefix hits again, because the blocks taken and filled before it have changed the cache. It
    gets no more tokens than were planned, and admissions end where one that keeps blocks free finds too few of them.
    """
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    num_planned, num_preempted = step.num_scheduled, step.num_preempted
    step.num_scheduled = step.num_preempted = 0
    for victim in range(num_preempted):
        position = 0
        while state.running[position] != state.preempted[victim]:
            position += 1
        queues.preempt(state, position)
    num_admitted = 0
    for place in range(num_planned):
        entry = state.batch[index, place]
        slot, num_tokens = entry.slot, entry.tokens
        if state.requests[slot].status == RUNNING:
            vllm_v1.give_blocks(state, slot, state.requests[slot].computed_tokens + num_tokens)
            steps.assign(state, slot, num_tokens)
        else:
            state.turns[num_admitted] = slot
            state.ranks[slot].group = num_tokens  # no order is needed any more; the batch is overwritten below
            num_admitted += 1
    for place in range(num_admitted):
        slot = state.turns[place]
        num_hits = blocks.find_hits(state, slot)
        before = queues.computed_before(state, slot, num_hits * engine.block_size)
        num_tokens = min(state.ranks[slot].group, steps.tokens_of(state, slot) - before)
        if not vllm_v1.fits(state, slot, num_hits, before + num_tokens):
            break
        queues.admit(state, waiting_position(state, slot), before)
        blocks.adopt_hits(state, slot, num_hits)
        vllm_v1.give_blocks(state, slot, before + num_tokens)
        steps.assign(state, slot, num_tokens)


@kernel
def will_decode_all(state: State, num_tokens: int) -> bool:
    """Return whether all running requests are in the planned step and decode from the next one on, and none joins."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    n = engine.num_running
    if step.num_preempted > 0 or step.num_scheduled < n or n > num_tokens:
        return False
    if engine.num_waiting > 0 and n < engine.max_num_seqs:
        return False
    for place in range(n):
        entry = state.batch[index, place]
        if not vllm_v1.goes_on_decoding(state, entry.slot, state.requests[entry.slot].computed_tokens + entry.tokens):
            return False
    return True


@kernel
def fill_seconds(state: State, count: int, share: float) -> bool:
    """Fill the step up to this share of the shortest TPOT target; 0: without a limit in seconds."""
    seconds = limit_s(state, count, share)
    return fill(state, count, state.engine[0].max_num_batched_tokens, seconds, seconds)


@kernel
def fill_tokens(state: State, count: int, num_tokens: float) -> bool:
    """Fill the step without a limit in seconds, up to `num_tokens` tokens; 0: the engine's limit alone."""
    return fill(state, count, token_limit(state, num_tokens), np.inf, np.inf)


@small_kernel
def token_limit(state: State, num_tokens: float) -> int:
    """Return a rule's limit of tokens in a step; for 0 it is the engine's."""
    most = state.engine[0].max_num_batched_tokens
    return min(most, int(num_tokens)) if num_tokens > 0 else most


@kernel
def can_decode_all(state: State, num_tokens: int, decode_limit_s: float) -> bool:
    """Return whether no request can join and a decode of every running one fits, so that their order has no effect."""
    engine = state.engine[0]
    n = engine.num_running
    if n == 0 or n > num_tokens or (engine.num_waiting > 0 and n < engine.max_num_seqs):
        return False
    num_blocks = context = longest = 0
    for position in range(n):
        slot = state.running[position]
        if not is_decode(state, slot) or (engine.pipeline_depth > 1 and awaits_output(state, slot)):
            return False
        tokens = state.requests[slot].computed_tokens + 1
        num_blocks += not blocks.has_room(state, slot, tokens)
        context += tokens
        longest = max(longest, tokens)
    if num_blocks > engine.num_free_blocks:
        return False
    return engine.belief * step_seconds(state.costs, n, n, n, context, 0, 0.0, 0.0, longest) <= decode_limit_s


@kernel
def decode_all(state: State) -> bool:
    """Add a decode of every running request; return whether all of them go on decoding."""
    steady = True
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        tokens = state.requests[slot].computed_tokens + 1
        if not state.engine[0].plans_only:
            vllm_v1.give_blocks(state, slot, tokens)
        steady = steady and vllm_v1.goes_on_decoding(state, slot, tokens)
        add(state, slot, tokens - 1, 1)
    return steady


@small_kernel
def add(state: State, slot: int, before: int, num_tokens: int) -> None:
    """Add tokens of a request, behind `before` others, to the step and to the sums that its duration depends on."""
    index = steps.current(state)
    step = state.steps[index]
    steps.assign(state, slot, num_tokens)
    entry = state.batch[index, step.num_scheduled - 1]
    entry.sampled = before + num_tokens >= steps.tokens_of(state, slot)
    steps.add_to_sums(step, entry, before)


@kernel
def largest_chunk(state: State, before: int, wanted: int, most: int, seconds: float) -> int:
    """Return how many of a request's `wanted` tokens, at most `most`, fit into the step; 0 where none does.

    The search assumes that a step takes longer with more tokens of a prefill. A single token is computed as a decode,
    which can be faster or slower.
    """
    if seconds == np.inf or fits_in_time(state, before, wanted, most, seconds):
        return most
    if most > 2 and fits_in_time(state, before, wanted, 2, seconds):
        chunk, too_many = 2, most
        while too_many - chunk > 1:
            middle = (chunk + too_many) // 2
            if fits_in_time(state, before, wanted, middle, seconds):
                chunk = middle
            else:
                too_many = middle
        return chunk
    return 1 if most > 1 and fits_in_time(state, before, wanted, 1, seconds) else 0


@kernel
def fits_in_time(state: State, before: int, wanted: int, num_tokens: int, seconds: float) -> bool:
    """Return whether the step ends within its limit with `num_tokens` more tokens of a request."""
    step = state.steps[steps.current(state)]
    num_decodes, num_prefills = step.num_decodes, step.num_prefills
    context, longest = step.decode_context, step.decode_longest
    prefill_qq, prefill_qkv = step.prefill_qq, step.prefill_qkv
    if num_tokens == 1:
        num_decodes += 1
        context += before + 1
        longest = max(longest, before + 1)
    else:
        num_prefills += 1
        prefill_qq += float(num_tokens) * num_tokens
        prefill_qkv += float(num_tokens) * before
    took_s = state.engine[0].belief * step_seconds(
        state.costs, step.num_tokens + num_tokens, step.num_sampled + (num_tokens == wanted), num_decodes, context,
        num_prefills, prefill_qq, prefill_qkv, longest,
    )  # fmt: skip
    return took_s <= seconds


@kernel
def make_room(state: State, slot: int, num_tokens: int) -> bool:
    """Choose the last running requests in the order to be preempted until blocks suffice for `num_tokens` tokens.

    Returns False where too few requests come after this one; those in the step already come before it.
    """
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    while blocks.blocks_for(num_tokens, engine.block_size) - state.requests[slot].num_blocks > engine.num_free_blocks:
        last = slot
        for position in range(engine.num_running):
            other = state.running[position]
            if state.ranks[other].cost_s != LEFT_OUT_S and goes_before(state, last, other):
                last = other
        if last == slot:
            return False
        state.ranks[last].cost_s = LEFT_OUT_S
        state.preempted[step.num_preempted] = last
        step.num_preempted += 1
        engine.num_free_blocks += blocks.count_own(state, last)
    return True


@kernel
def waiting_position(state: State, slot: int) -> int:
    """Return the position of a request in the waiting queue."""
    position = 0
    while queues.waiting_at(state, position) != slot:
        position += 1
    return position
