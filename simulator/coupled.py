"""Compiled code that couples the engines of a cluster with roles: prefill legs, hand-overs, decode legs.

A decode leg arrives at its engine a fixed time, the hop, after the end of its prefill leg. In the other direction there
is no delay: blocks that have been fetched are released at the prefill engine at once. All decode engines therefore run
first, as far as no arrival can still be unknown: to the earliest possible end of a prefill step, plus the hop. Then the
prefill engines run as far, knowing all releases until then. Each such window contains at least one event.
"""

from __future__ import annotations

import numpy as np

from predictor import queues
from predictor.compiled import direct, kernel, small_kernel
from predictor.state import FINISHED, NONE
from simulator.kernels import (
    DECODE_LEG,
    FULL,
    PREFILL_LEG,
    SENT,
    EngineArrays,
    Requests,
    advance_one,
    engine_at,
    fill_slot,
    is_quiet,
    take_slot,
    write_indicators,
)

PREFILL_ROLE = 1  # index in `scheduler.instances.ROLES`

# The stage of a leg. Until it is over, its slot is in the list `underway` of its engine.
OVER, PREFILLING, HELD, AWAITED, FETCHING = range(5)


# Sending.


@kernel
def send_prefill(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float, held_s: float
) -> int:  # fmt: skip
    """Send the prefill leg of a request; its blocks are predicted to be held for `held_s`. Return FULL or SENT."""
    slot = take_slot(fleet, requests, index, number, visible_s)
    if slot == NONE:
        return FULL
    fill_slot(fleet, requests, index, slot, number, arrives_s)
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    set_leg(state.requests[slot], PREFILL_LEG)
    state.requests[slot].held_s = np.inf  # until they are fetched
    put_underway(fleet, index, slot, PREFILL_LEG, PREFILLING)
    fleet.slots[index, slot].due_s = held_s
    legs = requests.legs[number]
    legs.prefill, legs.prefill_slot = index, slot
    legs.prefilled_s = float(NONE)
    queues.announce(state, slot)
    return SENT


@kernel
def await_decode(
    fleet: EngineArrays, requests: Requests, number: int, index: int, due_s: float, visible_s: float
) -> int:
    """Reserve an engine for a decode leg that is predicted to arrive at `due_s`. Return FULL or SENT."""
    slot = take_slot(fleet, requests, index, number, visible_s)
    if slot == NONE:
        return FULL
    fill_slot(fleet, requests, index, slot, number, due_s)
    set_leg(fleet.stack.requests[index, slot], DECODE_LEG)
    put_underway(fleet, index, slot, DECODE_LEG, AWAITED)
    fleet.slots[index, slot].due_s = due_s
    legs = requests.legs[number]
    legs.decode, legs.decode_slot = index, slot
    legs.fetched_s = float(NONE)
    return SENT


@kernel
def cancel_decode(fleet: EngineArrays, requests: Requests, number: int) -> None:
    """Free the engine that was reserved for a decode leg which has not arrived."""
    legs = requests.legs[number]
    index, slot = legs.decode, legs.decode_slot
    drop_underway(fleet, index, slot)
    legs.decode = legs.decode_slot = NONE
    instance = fleet.instances[index]
    fleet.slots[index, slot].number = NONE
    fleet.free_slots[index, instance.num_free_slots] = slot
    instance.num_free_slots += 1
    instance.changed = 1


@small_kernel
def put_underway(fleet: EngineArrays, index: int, slot: int, leg: int, stage: int) -> None:
    """Add a leg to those that are under way at an engine."""
    instance = fleet.instances[index]
    fleet.slots[index, slot].leg, fleet.slots[index, slot].stage = leg, stage
    fleet.underway[index, instance.num_underway] = slot
    instance.num_underway += 1


@kernel
def drop_underway(fleet: EngineArrays, index: int, slot: int) -> None:
    """Remove a leg that is over from those that are under way."""
    fleet.slots[index, slot].stage = OVER
    instance = fleet.instances[index]
    for position in range(instance.num_underway):
        if fleet.underway[index, position] == slot:
            instance.num_underway -= 1
            fleet.underway[index, position] = fleet.underway[index, instance.num_underway]
            break


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
            if fleet.instances[index].role != PREFILL_ROLE and run(fleet, index, bound_s):
                release_fetched(fleet, requests, index)
        for index in range(len(fleet.instances)):
            if fleet.instances[index].role == PREFILL_ROLE and run(fleet, index, bound_s):
                hand_over(fleet, requests, index, hop_s)
        if is_last:
            return


@small_kernel
def run(fleet: EngineArrays, index: int, until_s: float) -> bool:
    """Run one engine until a time; return False where it certainly does nothing."""
    instance = fleet.instances[index]
    if not instance.up or is_quiet_with_legs(fleet, index, until_s):
        return False
    advance_one(fleet, index, until_s)
    instance.changed = 1
    return True


@kernel
def earliest_prefill_end(fleet: EngineArrays) -> float:
    """Return a time before which no prefill leg can end; infinity where none is under way."""
    earliest_s, next_release_s = np.inf, -1.0
    for index in range(len(fleet.instances)):
        if fleet.instances[index].role != PREFILL_ROLE or not fleet.instances[index].up:
            continue
        engine = fleet.stack.engine[index, 0]
        if engine.num_running + engine.num_waiting + engine.num_pending == 0:
            continue
        own_s = next_event_s(fleet, index)
        if engine.stuck and engine.num_in_flight == 0:  # it waits for blocks that a decode engine has to fetch
            if next_release_s < 0:
                next_release_s = earliest_release(fleet)
            own_s = min(own_s, next_release_s)
        earliest_s = min(earliest_s, own_s)
    return earliest_s


@kernel
def earliest_release(fleet: EngineArrays) -> float:
    """Return a time before which no decode engine can end a fetch."""
    earliest_s = np.inf
    for index in range(len(fleet.instances)):
        if fleet.instances[index].role != PREFILL_ROLE and fleet.instances[index].up:
            earliest_s = min(earliest_s, next_event_s(fleet, index))
    return earliest_s
