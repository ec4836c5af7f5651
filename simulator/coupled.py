"""Compiled code that couples the engines of a cluster with roles: prefill legs, hand-overs, decode legs.

A decode leg arrives at its engine a fixed time, the hop, after the end of its prefill leg. In the other direction there
is no delay: blocks that have been fetched are released at the prefill engine at once. All decode engines therefore run
first, as far as no arrival can still be unknown: to the earliest possible end of a prefill step, plus the hop. Then the
prefill engines run as far, knowing all releases until then. Each such window contains at least one event.
"""

from __future__ import annotations

import numpy as np

from predictor import queues, remote_kv, steps
from predictor.compiled import direct, kernel, small_kernel
from predictor.state import FETCHING, FINISHED, HELD, LOST, NO_TRANSFER, NONE, SERVE_LEG, TO_FETCH
from simulator.advance import advance_one
from simulator.fleet_arrays import EngineArrays, Requests, engine_at
from simulator.indicator_kernels import write_changed
from simulator.request_slots import FULL, SENT, as_decode_leg, as_prefill_leg, fill_slot, send, take_slot

PREFILL_INDEX = 1  # index in `scheduler.instances.ROLES`


# Sending. The list `underway` of an engine has the slots of its prefill legs until they end, or of its decode legs
# until they have been fetched; their requests are in a slot from the decision on.


@kernel
def send_prefill(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float, held_s: float
) -> int:
    """Send the prefill leg of a request; its blocks are predicted to be held for `held_s`."""
    slot = take_slot(fleet, requests, index, number, visible_s)
    if slot == NONE:
        return FULL
    fill_slot(fleet, requests, index, slot, number, arrives_s)
    request, legs = fleet.stack.requests[index, slot], requests.legs[number]
    as_prefill_leg(request, np.inf)  # until they are fetched
    fleet.slots[index, slot].due_s = held_s
    put_underway(fleet, index, slot)
    legs.prefill, legs.prefill_slot = index, slot
    legs.prefilled_s = float(NONE)
    queues.announce(engine_at(fleet.stack, fleet.stack.costs, index), slot)
    return SENT


@kernel
def await_decode(
    fleet: EngineArrays, requests: Requests, number: int, index: int, visible_s: float, due_s: float
) -> int:
    """Reserve an engine for a decode leg that is predicted to arrive at `due_s`."""
    slot = take_slot(fleet, requests, index, number, visible_s)
    if slot == NONE:
        return FULL
    fill_slot(fleet, requests, index, slot, number, due_s)
    as_decode_leg(fleet.stack.requests[index, slot])
    fleet.slots[index, slot].is_awaited = 1
    fleet.slots[index, slot].due_s = due_s
    put_underway(fleet, index, slot)
    legs = requests.legs[number]
    legs.decode, legs.decode_slot = index, slot
    legs.fetched_s = float(NONE)
    return SENT


@kernel
def send_whole(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float
) -> int:
    """Send a request that one engine serves as a whole."""
    legs = requests.legs[number]
    legs.prefill = legs.prefill_slot = legs.decode = legs.decode_slot = NONE
    return send(fleet, requests, number, index, arrives_s, visible_s)


@small_kernel
def put_underway(fleet: EngineArrays, index: int, slot: int) -> None:
    """Add a leg to those that are under way at an engine."""
    instance = fleet.instances[index]
    fleet.underway[index, instance.num_underway] = slot
    instance.num_underway += 1


# Running.


@kernel
def advance_coupled(fleet: EngineArrays, requests: Requests, until_s: float, hop_s: float) -> None:
    """Run all engines until a time."""
    while True:
        arrives_s = earliest_prefill_end(fleet) + hop_s
        is_last = arrives_s > until_s or arrives_s == np.inf
        # a leg that arrives exactly then must be there before the step of that moment is planned
        bound_s = until_s if is_last else np.nextafter(arrives_s, -np.inf)
        for index in range(len(fleet.instances)):
            if fleet.instances[index].role != PREFILL_INDEX:
                advance_one(fleet, index, bound_s)
                release_fetched(fleet, requests, index, bound_s)
        for index in range(len(fleet.instances)):
            if fleet.instances[index].role == PREFILL_INDEX:
                advance_one(fleet, index, bound_s)
                hand_over(fleet, requests, index, hop_s)
        if is_last:
            return


@kernel
def earliest_prefill_end(fleet: EngineArrays) -> float:
    """Return a time before which no prefill leg can end; infinity where none is under way."""
    earliest_s, release_s = np.inf, -1.0
    for index in range(len(fleet.instances)):
        instance = fleet.instances[index]
        if instance.role != PREFILL_INDEX or not instance.up or instance.num_underway == 0:
            continue
        earliest_s = min(earliest_s, next_event_s(fleet, index))
        engine = fleet.stack.engine[index, 0]
        if engine.stuck and engine.num_in_flight == 0:  # it waits for blocks that a decode engine has to fetch
            if release_s < 0:
                release_s = earliest_release(fleet)
            earliest_s = min(earliest_s, release_s)
    return earliest_s


@kernel
def earliest_release(fleet: EngineArrays) -> float:
    """Return a time before which no decode engine ends a fetch whose blocks are not released yet."""
    earliest_s = np.inf
    for index in range(len(fleet.instances)):
        instance = fleet.instances[index]
        if instance.role == PREFILL_INDEX or not instance.up:
            continue
        earliest_s = min(earliest_s, next_event_s(fleet, index))
        state = engine_at(fleet.stack, fleet.stack.costs, index)
        for position in range(instance.num_underway):
            slot = fleet.underway[index, position]
            if state.requests[slot].stage == FETCHING:
                earliest_s = min(earliest_s, remote_kv.fetch_end_s(state, slot))
    return earliest_s


@small_kernel
def next_event_s(fleet: EngineArrays, index: int) -> float:
    """Return a time before which no step of an engine ends."""
    engine = fleet.stack.engine[index, 0]
    if engine.num_in_flight > 0:
        return float(fleet.stack.steps[index, engine.oldest].end_s)
    if engine.num_running + engine.num_waiting > 0 and not engine.stuck:
        return float(engine.now_s)
    next_s = float(engine.next_transfer_s)
    if engine.num_pending > 0:
        pending = fleet.stack.pending[index, engine.pending_head]
        next_s = min(next_s, float(fleet.stack.requests[index, pending].arrival_s))
    return next_s


@kernel
def hand_over(fleet: EngineArrays, requests: Requests, index: int, hop_s: float) -> None:
    """Send the decode legs of the prefill legs that have ended; of those that ended together, the first one first."""
    instance = fleet.instances[index]
    kept = 0
    for position in range(instance.num_underway):
        slot = fleet.underway[index, position]
        request = fleet.stack.requests[index, slot]
        if request.status != FINISHED:
            fleet.underway[index, kept] = slot
            kept += 1
            continue
        number = fleet.slots[index, slot].number
        legs = requests.legs[number]
        if legs.prefill != index or legs.prefill_slot != slot:  # the request was started again elsewhere
            hold_for_lease(fleet, index, slot, request.finished_s)
            continue
        legs.scheduled_s = request.scheduled_s
        legs.prefilled_s = request.finished_s
        legs.hit_tokens = request.hit_tokens
        requests.outcomes[number].num_preemptions += request.num_preemptions
        arrive(fleet, requests, number, request.finished_s + hop_s, request.stage == HELD)
    instance.num_underway = kept


@kernel
def arrive(fleet: EngineArrays, requests: Requests, number: int, arrives_s: float, has_blocks: bool) -> None:
    """Send a decode leg to the engine that waits for it; without blocks to fetch, it computes the whole request."""
    legs, facts = requests.legs[number], requests.facts[number]
    index, slot = legs.decode, legs.decode_slot
    request = fleet.stack.requests[index, slot]
    request.arrival_s = arrives_s
    fleet.stack.facts[index, slot].ttft_slo_s = facts.ttft_slo_s - (arrives_s - facts.arrival_s)
    fleet.slots[index, slot].is_awaited = 0
    fleet.instances[index].changed = 1
    if not has_blocks:
        request.leg, request.stage, request.transfer_s = SERVE_LEG, 0, 0.0
    queues.announce(engine_at(fleet.stack, fleet.stack.costs, index), slot)


@kernel
def hold_for_lease(fleet: EngineArrays, index: int, slot: int, now_s: float) -> None:
    """Hold the blocks of a finished prefill leg that no decode leg will fetch until the lease ends."""
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    if state.requests[slot].stage == HELD:
        remote_kv.set_end(state, slot, now_s + fleet.instances[index].lease_s)


@kernel
def lose_decode(fleet: EngineArrays, requests: Requests, number: int, now_s: float) -> None:
    """Forget the decode leg of a request, whose engine has failed."""
    legs = requests.legs[number]
    if legs.prefill_slot != NONE and legs.prefilled_s >= 0 and legs.fetched_s < 0:
        hold_for_lease(fleet, legs.prefill, legs.prefill_slot, now_s)
    legs.prefill = legs.prefill_slot = legs.decode = legs.decode_slot = NONE


@kernel
def lose_prefill(fleet: EngineArrays, requests: Requests, number: int, now_s: float, recomputes: bool) -> bool:
    """Take it that the prefill engine of a request has failed; return whether the request has to start again."""
    legs = requests.legs[number]
    index, slot = legs.decode, legs.decode_slot
    legs.prefill_slot = NONE
    if legs.fetched_s >= 0:
        return False
    instance, entry = fleet.instances[index], fleet.slots[index, slot]
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    instance.changed = 1
    if not entry.is_awaited:
        if state.requests[slot].stage == FETCHING:
            remote_kv.end_fetch(state, slot, now_s, False, 0)
        else:
            state.requests[slot].leg, state.requests[slot].stage = SERVE_LEG, NO_TRANSFER
        if recomputes:
            return False
        if state.requests[slot].stage == LOST:
            remote_kv.end_transfer(state, slot, now_s)
        steps.abort(state, slot)
        state.requests[slot].stage = NO_TRANSFER
    for position in range(instance.num_underway):
        if fleet.underway[index, position] == slot:
            instance.num_underway -= 1
            fleet.underway[index, position] = fleet.underway[index, instance.num_underway]
            break
    entry.number, entry.is_awaited = NONE, 0
    fleet.free_slots[index, instance.num_free_slots] = slot
    instance.num_free_slots += 1
    legs.prefill = legs.decode = legs.decode_slot = NONE
    return True


@kernel
def release_fetched(fleet: EngineArrays, requests: Requests, index: int, until_s: float) -> None:
    """Release the blocks that an engine, which has run until a time, has fetched until then."""
    instance = fleet.instances[index]
    if instance.num_underway == 0:
        return
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    kept = 0
    for position in range(instance.num_underway):
        slot = fleet.underway[index, position]
        request = state.requests[slot]
        fetched_s = np.inf
        if not (fleet.slots[index, slot].is_awaited or request.stage == TO_FETCH):
            fetched_s = remote_kv.fetch_end_s(state, slot)
        if fetched_s > until_s or fetched_s == np.inf:
            fleet.underway[index, kept] = slot
            kept += 1
            continue
        legs = requests.legs[fleet.slots[index, slot].number]
        if request.leg == SERVE_LEG or legs.prefill_slot == NONE:
            continue
        legs.fetched_s = fetched_s
        prefill = engine_at(fleet.stack, fleet.stack.costs, legs.prefill)
        if prefill.requests[legs.prefill_slot].stage == HELD:
            remote_kv.set_end(prefill, legs.prefill_slot, fetched_s)
    instance.num_underway = kept


@kernel
def refresh(
    fleet: EngineArrays, requests: Requests, now_s: float, hop_s: float, rows: np.ndarray, indicators: np.ndarray
) -> None:
    """Run all engines until now, and write the indicators that changed."""
    advance_coupled(fleet, requests, now_s, hop_s)
    write_changed(fleet, now_s, rows, indicators)


refresh_directly = direct(refresh)
