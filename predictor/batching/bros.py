"""BROS (Algorithm 1): real-time requests by the time left, then best effort as long as no deadline is missed by it.

A step has as many requests as the batch size allows, which doubles with every step and falls back to its base when
real-time requests alone take too long. A heap stands for the polling of sorted queues. Where the paper is silent: a
deadline that its request would miss even alone in a step limits no step, prompts are computed whole, and only a decode
that stays on time without this step is replaced by best effort. A request without blocks is skipped; the paper stops
there.
"""

from __future__ import annotations

import numpy as np

from predictor import blocks, estimator, queues, steps, two_ended_blocks
from predictor.batching import ordered, ordered_requests, vllm_v1
from predictor.compiled import kernel, small_kernel
from predictor.state import RUNNING, TWO_ENDED_LAYOUT, State

BASE_BATCH_SIZE, ETA = range(2)  # the options
(BATCH_SIZE,) = range(1)  # what it remembers
REAL_TIME, BEST_EFFORT, LEFT_OUT = range(3)  # groups


@kernel
def schedule(state: State) -> bool:
    """Fill the step."""
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    steps.clear_sums(step)
    batch_size = current_batch_size(state)
    count, num_real_time = list_by_class(state)
    limit_s, is_late = time_budget_s(state, count)
    is_shared = engine.kv_layout == TWO_ENDED_LAYOUT
    if (
        not is_shared
        and engine.num_waiting == 0
        and engine.num_running <= batch_size
        and ordered.can_decode_all(state, engine.max_num_batched_tokens, limit_s)
    ):
        engine.memory[BATCH_SIZE] = min(2 * batch_size, engine.max_num_seqs)
        engine.steady_limit_s = limit_s  # it grows while steps end within it
        is_steady = batch_size == engine.max_num_seqs and not is_late and estimator.is_constant(engine)
        return ordered.decode_all(state) and is_steady
    ordered_requests.make_heap(state, count)
    exceeded = False
    for _ in range(num_real_time):
        if step.num_scheduled == batch_size:
            break
        slot = ordered_requests.pop(state, count)
        count -= 1
        if not fits_in_tokens(state, slot):
            continue
        if step.num_scheduled > 0 and not fits_in_time(state, slot, limit_s):
            exceeded = True
            break
        if take_blocks(state, slot):
            add(state, slot)
    num_real_time = step.num_scheduled
    rank_best_effort(state, count)
    add_best_effort(state, count, num_real_time, batch_size, limit_s)
    register_full_blocks(state)
    base = min(int(engine.options[BASE_BATCH_SIZE]), engine.max_num_seqs)
    engine.memory[BATCH_SIZE] = base if exceeded else min(2 * batch_size, engine.max_num_seqs)
    return False


@small_kernel
def current_batch_size(state: State) -> int:
    """Return the batch size of this step; at first the base."""
    engine = state.engine[0]
    base = min(int(engine.options[BASE_BATCH_SIZE]), engine.max_num_seqs)
    return max(base, min(int(state.engine[0].memory[BATCH_SIZE]), engine.max_num_seqs))


@small_kernel
def is_best_effort(state: State, slot: int) -> bool:
    """Return whether a request is of the class best effort."""
    return state.facts[slot].request_class == 1


@kernel
def list_by_class(state: State) -> tuple[int, int]:
    """List all requests; return their number, and that of real-time ones.

    Real-time requests go by the time left until their next token is due, at most the target for this token.
    """
    count = ordered_requests.list_with_costs(state, False)
    num_real_time = 0
    for place in range(count):
        slot = state.turns[place]
        rank, request, facts = state.ranks[slot], state.requests[slot], state.facts[slot]
        if is_best_effort(state, slot):
            rank.group = BEST_EFFORT
            continue
        num_real_time += 1
        rank.group = REAL_TIME
        target = facts.ttft_slo_s if request.output_tokens == 0 else facts.tpot_slo_s
        rank.key = min(rank.due_s - state.engine[0].now_s, np.inf if np.isnan(target) else target)
    return count, num_real_time


@kernel
def rank_best_effort(state: State, count: int) -> None:
    """Order the requests that are left: best effort by its tokens in host memory, then the real-time ones."""
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        if rank.group == REAL_TIME:
            rank.group = LEFT_OUT
        elif state.requests[slot].status != RUNNING:
            rank.key = state.requests[slot].computed_tokens
    if state.engine[0].kv_layout == TWO_ENDED_LAYOUT:
        two_ended_blocks.add_checkpointed(state)
    ordered_requests.make_heap(state, count)


@kernel
def time_budget_s(state: State, count: int) -> tuple[float, bool]:
    """Return the least time left of the real-time requests, at least η of the shortest TPOT target.

    A decode that is late has its target left; a prompt that is late has no limit. Returns also whether one is late.
    """
    budget_s, is_late = np.inf, False
    constant_s = ordered_requests.constant_s(state)
    for place in range(count):
        slot = state.turns[place]
        rank = state.ranks[slot]
        if rank.group != REAL_TIME:
            continue
        left_s = rank.key
        if left_s < constant_s + rank.cost_s:
            is_late = True
            if state.requests[slot].output_tokens == 0 or np.isnan(state.facts[slot].tpot_slo_s):
                continue
            left_s = state.facts[slot].tpot_slo_s
        budget_s = min(budget_s, left_s)
    shortest_s = ordered_requests.shortest_tpot_s(state, count)
    if shortest_s < np.inf:
        budget_s = max(budget_s, state.engine[0].options[ETA] * shortest_s)
    return budget_s, is_late


@kernel
def add_best_effort(state: State, count: int, num_real_time: int, batch_size: int, limit_s: float) -> None:
    """Add best effort, or replace the least urgent real-time requests by it, until neither can be done."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    admits = True
    while count > 0:
        slot = ordered_requests.pop(state, count)
        count -= 1
        if state.ranks[slot].group != BEST_EFFORT:
            return
        runs = state.requests[slot].status == RUNNING
        if not runs and (not admits or step.num_preempted > 0 or engine.num_running == engine.max_num_seqs):
            continue
        if not fits_in_tokens(state, slot):
            continue
        replaced = -1
        if step.num_scheduled > 0 and (step.num_scheduled == batch_size or not fits_in_time(state, slot, limit_s)):
            if num_real_time < 2 or not can_wait(state, state.batch[index, num_real_time - 1].slot, limit_s):
                return
            replaced = state.batch[index, num_real_time - 1].slot
            sum_up_without(state, replaced)
            if step.num_scheduled > batch_size or not fits_in_time(state, slot, limit_s):
                sum_up_without(state, -1)
                return
        if not take_blocks(state, slot):
            admits = admits and runs
            if replaced >= 0:
                sum_up_without(state, -1)
            continue
        if replaced >= 0:
            num_real_time -= 1
            steps.unassign(state, replaced)
            if engine.kv_layout == TWO_ENDED_LAYOUT:
                two_ended_blocks.take_back_left(state, replaced)
        add(state, slot)


@small_kernel
def add(state: State, slot: int) -> None:
    """Add a running request to the step."""
    ordered.add(state, slot, state.requests[slot].computed_tokens, chunk_of(state, slot))


@kernel
def register_full_blocks(state: State) -> None:
    """Register for prefix hits the blocks that the step fills with known tokens."""
    index = steps.current(state)
    for position in range(state.steps[index].num_scheduled):
        entry = state.batch[index, position]
        request = state.requests[entry.slot]
        known = request.prompt_tokens + request.output_tokens
        blocks.register_full(state, entry.slot, min(request.computed_tokens + entry.tokens, known))


@small_kernel
def can_wait(state: State, slot: int, limit_s: float) -> bool:
    """Return whether a real-time request decodes, and is on time if it does so after this step."""
    rank = state.ranks[slot]
    if limit_s == np.inf or not ordered_requests.is_decode(state, slot):
        return False
    return rank.key - limit_s >= rank.cost_s + ordered_requests.constant_s(state)


@kernel
def sum_up_without(state: State, slot: int) -> None:
    """Sum up what the step's duration depends on, without a request."""
    index = steps.current(state)
    step = state.steps[index]
    steps.clear_sums(step)
    for position in range(step.num_scheduled):
        entry = state.batch[index, position]
        if entry.slot != slot:
            steps.add_to_sums(step, entry, state.requests[entry.slot].computed_tokens)


@kernel
def hit_tokens(state: State, slot: int) -> int:
    """Return how many tokens of a request need not be computed."""
    if state.requests[slot].status == RUNNING:
        return state.requests[slot].computed_tokens
    return queues.computed_before(state, slot, blocks.find_hits(state, slot) * state.engine[0].block_size)


@kernel
def chunk_of(state: State, slot: int) -> int:
    """Return the tokens of a request in a step: all that are left, within the engine's limits for one request."""
    engine = state.engine[0]
    tokens = min(steps.tokens_of(state, slot) - hit_tokens(state, slot), engine.max_num_batched_tokens)
    threshold = engine.long_prefill_token_threshold
    return min(tokens, threshold) if threshold > 0 and engine.num_running + engine.num_waiting > 1 else tokens


@kernel
def fits_in_tokens(state: State, slot: int) -> bool:
    """Return whether the step has tokens left for a request."""
    scheduled = state.steps[steps.current(state)].num_tokens
    return scheduled + chunk_of(state, slot) <= state.engine[0].max_num_batched_tokens


@kernel
def fits_in_time(state: State, slot: int, limit_s: float) -> bool:
    """Return whether the step ends within its limit with a request, its tokens in host memory included."""
    if limit_s == np.inf:
        return True
    before = hit_tokens(state, slot)
    wanted = steps.tokens_of(state, slot) - before
    if not ordered.fits_in_time(state, before, wanted, chunk_of(state, slot), limit_s):
        return False
    swapped = state.steps[steps.current(state)].num_swapped + in_host_memory(state, slot)
    return swapped * state.engine[0].swap_token_s <= limit_s


@small_kernel
def in_host_memory(state: State, slot: int) -> int:
    """Return how many tokens of a request are copied back when it is served."""
    if is_best_effort(state, slot):
        return int(state.ranks[slot].key)
    return 0 if state.requests[slot].status == RUNNING else state.requests[slot].computed_tokens


@kernel
def take_blocks(state: State, slot: int) -> bool:
    """Give a request blocks for its tokens in this step; return False where too few are left.

    A running request takes those of requests that go after it, best effort before real-time ones. A waiting real-time
    request takes those of best effort, and waiting best effort only free ones.
    """
    engine = state.engine[0]
    before, chunk = hit_tokens(state, slot), chunk_of(state, slot)
    placed = 0
    if state.requests[slot].status == RUNNING:
        placed = before
        while not has_room(state, slot, before + chunk):
            if not preempt_for(state, slot):
                return False
    else:
        if not make_room_to_admit(state, slot, before + chunk):
            return False
        num_hits = blocks.find_hits(state, slot)
        queues.admit(state, ordered.waiting_position(state, slot), before)
        blocks.adopt_hits(state, slot, num_hits)
    if engine.kv_layout != TWO_ENDED_LAYOUT:
        blocks.allocate(state, slot, before + chunk)
    elif is_best_effort(state, slot):
        two_ended_blocks.grow_right(state, slot, before + chunk - placed)
    else:
        two_ended_blocks.grow_left(state, slot, before + chunk - placed)
    return True


@kernel
def has_room(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether there are blocks for a running request's first `num_tokens` tokens."""
    engine, request = state.engine[0], state.requests[slot]
    if engine.kv_layout != TWO_ENDED_LAYOUT:
        return blocks.blocks_for(num_tokens, engine.block_size) - request.num_blocks <= engine.num_free_blocks
    num_new = num_tokens - request.computed_tokens
    if is_best_effort(state, slot):
        return two_ended_blocks.fits_right(state, slot, num_new + in_host_memory(state, slot))
    return two_ended_blocks.fits_left(state, slot, num_new)


@kernel
def fits(state: State, slot: int, num_tokens: int) -> bool:
    """Return whether there are blocks to admit a request with its first `num_tokens` tokens."""
    if state.engine[0].kv_layout != TWO_ENDED_LAYOUT:
        return vllm_v1.fits(state, slot, blocks.find_hits(state, slot), num_tokens)
    if is_best_effort(state, slot):
        return two_ended_blocks.fits_right(state, slot, num_tokens)
    return two_ended_blocks.fits_left(state, slot, num_tokens)


@kernel
def make_room_to_admit(state: State, slot: int, num_tokens: int) -> bool:
    """Preempt best effort for a waiting real-time request, the last first; none where that does not suffice."""
    engine = state.engine[0]
    if is_best_effort(state, slot):
        return fits(state, slot, num_tokens)
    num_preemptible = held = 0
    for position in range(engine.num_running):
        if is_best_effort(state, state.running[position]):
            num_preemptible += 1
            held += state.requests[state.running[position]].num_blocks
    if engine.num_running - num_preemptible == engine.max_num_seqs:
        return False
    engine.num_free_blocks += held
    suffices = fits(state, slot, num_tokens)
    engine.num_free_blocks -= held
    if not suffices:
        return False
    while engine.num_running == engine.max_num_seqs or not fits(state, slot, num_tokens):
        if not preempt_last(state, slot, BEST_EFFORT):
            return False
    return True


@kernel
def preempt_for(state: State, slot: int) -> bool:
    """Preempt a request that goes after a running one; return False where no other request has blocks of use.

    Of two-ended blocks a real-time request needs the left, which best effort does not have.
    """
    if is_best_effort(state, slot):
        return preempt_last(state, slot, BEST_EFFORT)
    if state.engine[0].kv_layout != TWO_ENDED_LAYOUT and preempt_last(state, slot, BEST_EFFORT):
        return True
    return preempt_last(state, slot, REAL_TIME)


@kernel
def preempt_last(state: State, slot: int, group: int) -> bool:
    """Preempt the last running request of a class that goes after a request; return False where there is none."""
    last, last_position = slot, -1
    for position in range(state.engine[0].num_running):
        other = state.running[position]
        if is_best_effort(state, other) == (group == BEST_EFFORT) and ordered_requests.goes_before(state, last, other):
            last, last_position = other, position
    if last_position < 0:
        return False
    queues.preempt(state, last_position)
    return True
