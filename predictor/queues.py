"""The queues of an engine: requests are pending, waiting, running; they are admitted, preempted, finished."""

from __future__ import annotations

import numpy as np

from predictor import blocks, encoder_inputs, remote_kv
from predictor.compiled import kernel, small_kernel
from predictor.state import (
    DECODE_LEG,
    FINISHED,
    MEMORY_SIZE,
    PLAIN_LAYOUT,
    PREFILL_LEG,
    RUNNING,
    WAITING,
    State,
)

# vLLM can preempt forever: of two requests with equal priority and arrival that do not fit together, admission prefers
# one and preemption the other. An engine model stops after this many preemptions without a token.
MAX_FRUITLESS_PREEMPTIONS = 10_000


@small_kernel
def at(ring_head: int, position: int, size: int) -> int:
    """Return the index in a ring of `size` elements of the element at `position`, counted from the head."""
    index = ring_head + position
    return index - size if index >= size else index


@small_kernel
def waiting_at(state: State, position: int) -> int:
    """Return the slot at a position of the waiting queue, counted from its head."""
    return state.waiting[at(state.engine[0].waiting_head, position, len(state.waiting))]


@small_kernel
def num_present(state: State) -> int:
    """Return the number of requests that run, wait or arrive."""
    engine = state.engine[0]
    return int(engine.num_running + engine.num_waiting + engine.num_pending)


@small_kernel
def present_at(state: State, place: int) -> int:
    """Return one of the requests that run, wait or arrive."""
    engine = state.engine[0]
    if place < engine.num_running:
        return int(state.running[place])
    place -= engine.num_running
    if place < engine.num_waiting:
        return int(waiting_at(state, place))
    return int(state.pending[at(engine.pending_head, place - engine.num_waiting, len(state.pending))])


@small_kernel
def goes_before(state: State, slot: int, other: int) -> bool:
    """Order by priority, then arrival, then id, as vLLM's `Request.__lt__`: the lower one goes first."""
    a, b = state.requests[slot], state.requests[other]
    if a.priority != b.priority:
        return a.priority < b.priority
    if a.arrival_s != b.arrival_s:
        return a.arrival_s < b.arrival_s
    return a.tie_break < b.tie_break


@small_kernel
def enqueue(state: State, slot: int) -> None:
    """Add an arriving request to the waiting queue: at its end, or in the order of priorities."""
    engine = state.engine[0]
    size = len(state.waiting)
    state.requests[slot].status = WAITING
    position = engine.num_waiting
    engine.num_waiting += 1
    if engine.queue_by_priority:
        while position > engine.num_holding and goes_before(state, slot, waiting_at(state, position - 1)):
            state.waiting[at(engine.waiting_head, position, size)] = waiting_at(state, position - 1)
            position -= 1
    state.waiting[at(engine.waiting_head, position, size)] = slot


@small_kernel
def take_waiting(state: State, position: int) -> int:
    """Remove and return the request at a position of the waiting queue."""
    engine = state.engine[0]
    size = len(state.waiting)
    slot = waiting_at(state, position)
    for moved in range(position, 0, -1):
        state.waiting[at(engine.waiting_head, moved, size)] = waiting_at(state, moved - 1)
    engine.waiting_head = at(engine.waiting_head, 1, size)
    engine.num_waiting -= 1
    if position < engine.num_holding:
        engine.num_holding -= 1
    return slot


@kernel
def keep_waiting_with_blocks(state: State, position: int) -> None:
    """Move a waiting request that has got blocks behind the others that have some, or in their order of priorities."""
    engine = state.engine[0]
    if not engine.holding_first:
        return
    size = len(state.waiting)
    slot = waiting_at(state, position)
    for moved in range(position, engine.num_holding, -1):
        state.waiting[at(engine.waiting_head, moved, size)] = waiting_at(state, moved - 1)
    place = engine.num_holding
    engine.num_holding += 1
    if engine.queue_by_priority:
        while place > 0 and goes_before(state, slot, waiting_at(state, place - 1)):
            state.waiting[at(engine.waiting_head, place, size)] = waiting_at(state, place - 1)
            place -= 1
    state.waiting[at(engine.waiting_head, place, size)] = slot


@small_kernel
def admit(state: State, position: int, computed_tokens: int) -> int:
    """Move a waiting request to the end of the running list.

    `computed_tokens` of it are in the cache already, or are copied back from host memory.
    """
    engine = state.engine[0]
    if engine.kv_layout != PLAIN_LAYOUT:
        state.steps[at(engine.oldest, engine.num_in_flight, 2)].num_swapped += computed_tokens
    slot = take_waiting(state, position)
    state.running[engine.num_running] = slot
    engine.num_running += 1
    request = state.requests[slot]
    request.status = RUNNING
    request.computed_tokens = computed_tokens
    request.prefill_tokens = request.prompt_tokens + request.output_tokens
    if request.num_preemptions == 0 and request.leg != DECODE_LEG:
        request.hit_tokens = computed_tokens
    return slot


@small_kernel
def computed_before(state: State, slot: int, hit_tokens: int) -> int:
    """Return how many tokens of a waiting request need not be computed: those in the cache, or in host memory."""
    if state.engine[0].kv_layout == PLAIN_LAYOUT:
        return hit_tokens
    return state.requests[slot].computed_tokens


@kernel
def preempt(state: State, position: int) -> int:
    """Free a running request's blocks and move it to the front of the waiting queue; it keeps its output.

    Its computed tokens are lost, or copied to host memory, as the engine's KV layout says.
    """
    engine = state.engine[0]
    slot = state.running[position]
    engine.num_running -= 1
    for moved in range(position, engine.num_running):
        state.running[moved] = state.running[moved + 1]
    in_host_memory = blocks.release(state, slot)
    if encoder_inputs.has_some(state, slot):
        encoder_inputs.release(state, slot)
    request = state.requests[slot]
    step = state.steps[at(engine.oldest, engine.num_in_flight, 2)]
    if engine.kv_layout == PLAIN_LAYOUT:
        request.computed_tokens = 0
    else:
        step.num_swapped += request.computed_tokens - in_host_memory
    request.stale_tokens = request.in_flight_tokens
    request.placeholders = request.draft_tokens = 0
    request.num_preemptions += 1
    engine.num_preemptions += 1
    engine.num_setbacks += 1
    engine.fruitless_preemptions += 1
    if engine.fruitless_preemptions > MAX_FRUITLESS_PREEMPTIONS:
        engine.stuck = 1
    if engine.queue_by_priority:
        enqueue(state, slot)
    else:
        size = len(state.waiting)
        engine.waiting_head = at(engine.waiting_head, size - 1, size)
        engine.num_waiting += 1
        for place in range(engine.num_holding):
            state.waiting[at(engine.waiting_head, place, size)] = waiting_at(state, place + 1)
        state.waiting[at(engine.waiting_head, engine.num_holding, size)] = slot
        request.status = WAITING
    state.preempted[step.num_preempted] = slot
    step.num_preempted += 1
    return slot


@small_kernel
def finish(state: State, slot: int) -> None:
    """End a request and free its blocks; the caller removes it from its queue.

    A steady engine stays steady where no request waits for the freed blocks, unless the request ended unpredictably:
    then it is still part of a step in flight, whose end may free its blocks.
    """
    engine, request = state.engine[0], state.requests[slot]
    if engine.num_waiting > 0 or request.in_flight_tokens > 0:
        engine.steady = 0
    request.status = FINISHED
    request.finished_s = engine.now_s
    if encoder_inputs.has_some(state, slot):
        encoder_inputs.release(state, slot)
    if remote_kv.is_under_way(request.stage):  # blocks are written to until its transfer ends
        return
    if engine.is_sglang and request.num_blocks > 0:
        blocks.share_full(state, slot, min(request.computed_tokens, request.prompt_tokens + request.output_tokens))
    if not engine.defers_frees or request.in_flight_tokens == 0:
        blocks.release(state, slot)


@small_kernel
def complete(state: State, slot: int) -> None:
    """End a request that has its last token; the blocks of a prefill leg are held for the decode leg."""
    request = state.requests[slot]
    if request.leg != PREFILL_LEG or request.num_blocks == 0:  # without blocks if it was preempted meanwhile
        finish(state, slot)
        return
    state.engine[0].steady = 0
    request.status = FINISHED
    request.finished_s = state.engine[0].now_s
    if encoder_inputs.has_some(state, slot):
        encoder_inputs.release(state, slot)
    remote_kv.hold(state, slot)


@small_kernel
def drop_finished(state: State, from_waiting: bool) -> None:
    """Remove finished requests from the running list, and from the waiting queue where asked."""
    engine = state.engine[0]
    kept = 0
    for position in range(engine.num_running):
        slot = state.running[position]
        if state.requests[slot].status == RUNNING:
            state.running[kept] = slot
            kept += 1
    engine.num_running = kept
    if from_waiting:
        position = 0
        while position < engine.num_waiting:
            if state.requests[waiting_at(state, position)].status == FINISHED:
                take_waiting(state, position)
            else:
                position += 1


@small_kernel
def forget_when_idle(state: State) -> None:
    """Reset what SGLang's scheduler remembers where no request is left, nor one that has arrived already."""
    engine = state.engine[0]
    if not engine.is_sglang or engine.num_running + engine.num_waiting + engine.num_in_flight > 0:
        return
    if next_arrival_s(state) > engine.now_s:
        for index in range(MEMORY_SIZE):
            engine.memory[index] = 0.0


@kernel
def announce(state: State, slot: int) -> None:
    """Add a request that will arrive at its `arrival_s` to the pending ones, behind those that arrive no later."""
    engine = state.engine[0]
    size = len(state.pending)
    arrival_s = state.requests[slot].arrival_s
    position = engine.num_pending
    engine.num_pending += 1
    while position > 0:
        before = state.pending[at(engine.pending_head, position - 1, size)]
        if state.requests[before].arrival_s <= arrival_s:
            break
        state.pending[at(engine.pending_head, position, size)] = before
        position -= 1
    state.pending[at(engine.pending_head, position, size)] = slot


@kernel
def take_pending(state: State, slot: int) -> None:
    """Remove a request from the pending ones."""
    engine = state.engine[0]
    size = len(state.pending)
    kept = 0
    for position in range(engine.num_pending):
        other = state.pending[at(engine.pending_head, position, size)]
        if other != slot:
            state.pending[at(engine.pending_head, kept, size)] = other
            kept += 1
    engine.num_pending = kept


@small_kernel
def absorb_arrivals(state: State) -> None:
    """Move every pending request that has arrived to the waiting queue."""
    if next_arrival_s(state) <= state.engine[0].now_s:
        _absorb(state)


@kernel
def _absorb(state: State) -> None:
    engine = state.engine[0]
    while next_arrival_s(state) <= engine.now_s:
        slot = state.pending[engine.pending_head]
        engine.pending_head = at(engine.pending_head, 1, len(state.pending))
        engine.num_pending -= 1
        join(state, slot)


@kernel
def join(state: State, slot: int) -> None:
    """Add a request to the waiting queue; the engine then has to plan its next step."""
    state.engine[0].steady = state.engine[0].stuck = 0
    enqueue(state, slot)


@small_kernel
def next_event_s(state: State) -> float:
    """Return when something happens that no step causes: an arrival, or the end of a transfer."""
    return min(next_arrival_s(state), state.engine[0].next_transfer_s)


@small_kernel
def next_arrival_s(state: State) -> float:
    """Return the arrival of the first pending request; infinity without one."""
    engine = state.engine[0]
    if engine.num_pending == 0:
        return float("inf")
    return state.requests[state.pending[engine.pending_head]].arrival_s


@kernel
def last_arrival_s(state: State) -> float:
    """Return the arrival of the last pending request; minus infinity without one."""
    engine = state.engine[0]
    if engine.num_pending == 0:
        return -np.inf
    last = at(engine.pending_head, engine.num_pending - 1, len(state.pending))
    return state.requests[state.pending[last]].arrival_s


@kernel
def lowest_ranked(state: State) -> int:
    """Return the position of the running request that is last by priority, then arrival; the first of equal ones."""
    worst = 0
    for position in range(1, state.engine[0].num_running):
        a, b = state.requests[state.running[position]], state.requests[state.running[worst]]
        if a.priority > b.priority or (a.priority == b.priority and a.arrival_s > b.arrival_s):
            worst = position
    return worst
