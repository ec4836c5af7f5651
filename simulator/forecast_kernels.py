"""What a request would experience on each engine of a simulated cluster, in one call of compiled code.

A forecast lets the engine run on until the request has ended. What happens before an engine has come to the tail of
its queue does not depend on who joins that queue: where nothing can come otherwise than foreseen, this part is kept
from one forecast to the next, and requests that have joined meanwhile are put into what was kept.
"""

from __future__ import annotations

import numpy as np

from predictor import loop, queues
from predictor.compiled import direct, kernel, small_kernel
from predictor.engine import ANY_NUMBER, FOREVER
from predictor.forecast import compare, read_result
from predictor.state import NOBODY, State, copy_into, layer
from predictor.step_time import step_seconds
from simulator.kernels import CANDIDATE, EngineArrays, Requests, engine_at, expected_tokens, fill_slot

SEEN, AFTER, ALONE, AHEAD = 0, 1, 2, 3  # layers of the workspace: for one forecast; from AHEAD on, one kept per engine


@kernel
def copy_as_seen(fleet: EngineArrays, index: int, source: State, target: State, now_s: float) -> None:
    """Copy an engine as its sidecar sees it: with lengths by their tags, its own step times, and what it knows of."""
    copy_into(target, source)
    engine, unit, slots = target.engine[0], fleet.units[index], fleet.slots[index]
    size = len(target.pending)
    place = 0
    while place < engine.num_pending:
        slot = target.pending[queues.at(engine.pending_head, place, size)]
        if slots[slot].shown_s > now_s:
            queues.take_pending(target, slot)
        else:
            estimate(fleet, target.requests[slot], slots[slot])
            place += 1
    for position in range(engine.num_running):
        slot = target.running[position]
        estimate(fleet, target.requests[slot], slots[slot])
    for position in range(engine.num_waiting):
        slot = target.waiting[queues.at(engine.waiting_head, position, size)]
        estimate(fleet, target.requests[slot], slots[slot])
    engine.pace = unit.foreseen_pace
    foresee_steps(target, now_s)


@small_kernel
def estimate(fleet: EngineArrays, request: np.record, entry: np.record) -> None:
    """Let a request end where its tag says."""
    if not np.isnan(entry.log_median):
        whole = expected_tokens(entry.log_median, entry.spread, request.output_tokens, fleet.residual)
        request.final_tokens = request.expected_tokens = min(whole, request.max_tokens)


@kernel
def foresee_steps(state: State, now_s: float) -> None:
    """Let steps under way end when they are foreseen to, and not before now."""
    engine = state.engine[0]
    before_s = 0.0
    for ahead in range(engine.num_in_flight):
        step = state.steps[(engine.oldest + ahead) % 2]
        seconds = step_seconds(
            state.costs, step.num_tokens, step.num_sampled, step.num_decodes, step.decode_context, step.num_prefills,
            step.prefill_qq, step.prefill_qkv, step.decode_longest,
        )  # fmt: skip
        step.start_s = max(step.start_s, before_s)
        step.end_s = before_s = max(now_s, step.start_s + engine.pace * seconds)


@kernel
def begin(fleet: EngineArrays, workspace: State, index: int, target: State, now_s: float) -> None:
    """Put an engine into `target` as it is seen now, or as far ahead as who joins it now would make no difference."""
    source = engine_at(fleet.stack, fleet.foreseen, index)
    engine, unit, slots = source.engine[0], fleet.units[index], fleet.slots[index]
    if not unit.certain or engine.by_priority or not loop.has_tail_ahead(source):
        copy_as_seen(fleet, index, source, target, now_s)
        return
    ahead = layer(workspace, source, AHEAD + index)
    if not unit.is_ahead or ahead.engine[0].num_steps < engine.num_steps:
        start_ahead(source, ahead)
        ahead.engine[0].pace = unit.pace
        unit.is_ahead = 1
    else:
        let_join(source, ahead)
    loop.drive(ahead, FOREVER, np.int64(ANY_NUMBER), np.int64(loop.TAIL_OF_QUEUE))
    copy_into(target, ahead)
    for place in range(engine.num_pending):
        slot = source.pending[queues.at(engine.pending_head, place, len(source.pending))]
        if slots[slot].shown_s <= now_s:
            target.requests[slot] = source.requests[slot]
            queues.announce(target, slot)


@kernel
def start_ahead(source: State, ahead: State) -> None:
    """Make of an engine one that can run ahead of it, without those who have not joined its queue.

    It has met the requests whose serials stand in its slots.
    """
    for slot in range(len(ahead.requests)):
        ahead.requests[slot].serial = NOBODY
    copy_into(ahead, source)
    engine = ahead.engine[0]
    for place in range(engine.num_pending):
        ahead.requests[ahead.pending[queues.at(engine.pending_head, place, len(ahead.pending))]].serial = NOBODY
    engine.num_pending = 0


@kernel
def let_join(source: State, ahead: State) -> None:
    """Put those at the queue's tail that it has not met yet into the queue of an engine that is ahead."""
    first_new = source.engine[0].num_waiting
    while first_new > 0:
        slot = queues.waiting_at(source, first_new - 1)
        if ahead.requests[slot].serial == source.requests[slot].serial:
            break
        first_new -= 1
    for place in range(first_new, source.engine[0].num_waiting):
        slot = queues.waiting_at(source, place)
        ahead.requests[slot] = source.requests[slot]
        queues.join(ahead, slot)


@kernel
def foretell(
    fleet: EngineArrays, requests: Requests, workspace: State, number: int, places: np.ndarray, now_s: float,
    with_delays: bool, results: np.ndarray,
) -> None:  # fmt: skip
    """Foretell what a request would experience on each of some engines, as each sidecar would say it."""
    any_number, nobody = np.int64(ANY_NUMBER), np.int64(NOBODY)
    slot = np.int64(CANDIDATE)
    for place in range(len(places)):
        index = places[place]
        source = engine_at(fleet.stack, fleet.foreseen, index)
        fill_slot(fleet, requests, index, slot, number, now_s)
        entry = fleet.slots[index, slot]
        entry.log_median, entry.spread = requests.asked[number].log_median, requests.asked[number].spread
        estimate(fleet, source.requests[slot], entry)
        seen, after = layer(workspace, source, SEEN), layer(workspace, source, AFTER)
        alone = layer(workspace, source, ALONE)
        if with_delays:
            begin(fleet, workspace, index, seen, now_s)
            copy_into(alone, seen)
            loop.drive(alone, FOREVER, any_number, nobody)
            copy_into(after, seen)
        else:
            begin(fleet, workspace, index, after, now_s)
        after.requests[slot] = source.requests[slot]
        queues.announce(after, slot)
        loop.drive(after, FOREVER, any_number, nobody if with_delays else slot)
        read_result(after, slot, now_s, results[place])
        if with_delays:
            compare(seen, seen, alone, after, slot, results[place])


@kernel
def drain(fleet: EngineArrays, workspace: State, now_s: float, drained_s: np.ndarray) -> None:
    """Foretell for each engine when everything there has ended."""
    any_number, nobody = np.int64(ANY_NUMBER), np.int64(NOBODY)
    for index in range(len(fleet.units)):
        source = engine_at(fleet.stack, fleet.foreseen, index)
        after = layer(workspace, source, AFTER)
        begin(fleet, workspace, index, after, now_s)
        loop.drive(after, FOREVER, any_number, nobody)
        drained_s[index] = max(0.0, after.engine[0].now_s - now_s)


foretell_directly, drain_directly = direct(foretell), direct(drain)
