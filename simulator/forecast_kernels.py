"""Forecasts of a request on each engine of a simulated cluster, in one call of compiled code.

A forecast runs a copy of the engine until the request has finished. Until an engine reaches the tail of its waiting
queue, its steps do not depend on requests that join at the tail. If the engine is deterministic, the state at that
point (the lookahead) is therefore kept from one forecast to the next, and requests that joined since are added to it.
"""

from __future__ import annotations

import numpy as np

from predictor import loop, queues, remote_kv
from predictor.compiled import direct, kernel, small_kernel
from predictor.forecast_kernels import compare, read_result, stop_counting_on_time
from predictor.forecast_result import FIRST_TOKEN, TO_THE_END
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.state import DECODE_LEG, HELD, NONE, PREFILL_LEG, State
from predictor.state_copies import copy_blocks, copy_into, copy_requests, layer
from predictor.tabulated_costs import step_seconds
from predictor.verdict import find_verdict, hide_unknown, reach_first_token
from simulator.fleet_arrays import CANDIDATE, EngineArrays, Requests, engine_at
from simulator.predicted_lengths import predicted_tokens
from simulator.request_slots import as_decode_leg, as_prefill_leg, fill_slot

# Layers of the workspace: without the request, and a copy to run without it; then for each engine a copy to run with
# the request, and a lookahead. Of blocks only those are copied that differ, which are few in a copy of the same engine.
BEFORE, WITHOUT, FIRST_OF_ENGINES = 0, 1, 2
LAYERS_OF_ENGINE = WITH, LOOKAHEAD = 0, 1


@small_kernel
def layer_of(workspace: State, source: State, index: int, which: int) -> State:
    """Return a layer that an engine has to itself."""
    return layer(workspace, source, FIRST_OF_ENGINES + len(LAYERS_OF_ENGINE) * index + which)


@kernel
def copy_as_known(fleet: EngineArrays, index: int, source: State, target: State, now_s: float) -> None:
    """Copy an engine as its sidecar knows it: lengths by tags, predicted step times, only requests that are visible.

    Its blocks are those of the source.
    """
    copy_requests(target, source)
    engine, instance, slots = target.engine[0], fleet.instances[index], fleet.slots[index]
    engine.least_slack_s = np.inf
    engine.unmeasured_s = 0.0
    size = len(target.pending)
    position = 0
    while position < engine.num_pending:
        slot = target.pending[queues.at(engine.pending_head, position, size)]
        if slots[slot].visible_s > now_s:
            queues.take_pending(target, slot)
        else:
            apply_tag(fleet, target.requests[slot], slots[slot])
            position += 1
    for position in range(engine.num_running):
        slot = target.running[position]
        apply_tag(fleet, target.requests[slot], slots[slot])
    for position in range(engine.num_waiting):
        slot = target.waiting[queues.at(engine.waiting_head, position, size)]
        apply_tag(fleet, target.requests[slot], slots[slot])
    if instance.num_underway + engine.num_transfers > 0:
        know_legs(fleet, index, target, now_s)
    engine.pace = instance.predicted_pace
    predict_step_ends(target, now_s)


@kernel
def know_legs(fleet: EngineArrays, index: int, target: State, now_s: float) -> None:
    """Add what the sidecar of an engine with a role knows: decode legs to come, and how long blocks will be held."""
    slots = fleet.slots[index]
    for position in range(fleet.instances[index].num_underway):
        slot = fleet.underway[index, position]
        request = target.requests[slot]
        if slots[slot].is_awaited:
            if slots[slot].visible_s <= now_s:
                target.requests[slot] = fleet.stack.requests[index, slot]
                apply_tag(fleet, target.requests[slot], slots[slot])
                target.requests[slot].arrival_s = max(now_s, slots[slot].due_s)
                queues.announce(target, slot)
        elif request.leg == PREFILL_LEG:
            request.transfer_s = slots[slot].due_s
    for position in range(target.engine[0].num_transfers):
        slot = target.transfers[position]
        if target.requests[slot].stage == HELD:
            target.requests[slot].transfer_s = max(now_s, target.requests[slot].finished_s + slots[slot].due_s)
    remote_kv.find_next(target)


@small_kernel
def apply_tag(fleet: EngineArrays, request: np.record, entry: np.record) -> None:
    """Set a request's total length to what its tag predicts."""
    if not np.isnan(entry.log_median):
        whole = predicted_tokens(entry.log_median, entry.spread, request.output_tokens, fleet.residual)
        request.final_tokens = request.expected_tokens = min(whole, request.max_tokens)


@kernel
def predict_step_ends(state: State, now_s: float) -> None:
    """Set the ends of steps in flight to their predicted ends, and not before now."""
    engine = state.engine[0]
    previous_end_s = 0.0
    for position in range(engine.num_in_flight):
        step = state.steps[(engine.oldest + position) % 2]
        seconds = step_seconds(
            state.costs, step.num_tokens, step.num_sampled, step.num_decodes, step.decode_context, step.num_prefills,
            step.prefill_qq, step.prefill_qkv, step.decode_longest,
        )  # fmt: skip
        step.start_s = max(step.start_s, previous_end_s)
        step.end_s = previous_end_s = max(now_s, step.start_s + engine.pace * seconds)


@kernel
def copy_for_forecast(
    fleet: EngineArrays, workspace: State, index: int, target: State, now_s: float, reads_slack: bool
) -> State:
    """Copy an engine as it is known now, or from its lookahead if it can have one; return the state with its blocks.

    The least slack of a lookahead may be that of a token before now: a forecast that reads it starts from now.
    """
    source = engine_at(fleet.stack, fleet.predicted_costs, index)
    engine, instance, slots = source.engine[0], fleet.instances[index], fleet.slots[index]
    if not instance.deterministic or engine.by_priority or not loop.has_tail_ahead(source):
        copy_as_known(fleet, index, source, target, now_s)
        return source
    lookahead = layer_of(workspace, source, index, LOOKAHEAD)
    if not instance.has_lookahead or lookahead.engine[0].num_steps < engine.num_steps:
        start_lookahead(source, lookahead)
        lookahead.engine[0].pace = instance.pace
        instance.has_lookahead = 1
    else:
        add_joined(source, lookahead)
    loop.run(lookahead, FOREVER, ANY_NUMBER, loop.TAIL_OF_QUEUE)
    if reads_slack and lookahead.engine[0].least_slack_s < FOREVER:
        copy_as_known(fleet, index, source, target, now_s)
        return source
    copy_requests(target, lookahead)
    for position in range(engine.num_pending):
        slot = source.pending[queues.at(engine.pending_head, position, len(source.pending))]
        if slots[slot].visible_s <= now_s:
            target.requests[slot] = source.requests[slot]
            queues.announce(target, slot)
    return lookahead


@kernel
def start_lookahead(source: State, lookahead: State) -> None:
    """Start the lookahead of an engine, without its pending requests.

    A lookahead contains the requests whose serials are in its slots.
    """
    for slot in range(len(lookahead.requests)):
        lookahead.requests[slot].serial = NONE
    copy_into(lookahead, source)
    engine = lookahead.engine[0]
    engine.least_slack_s = np.inf
    engine.unmeasured_s = 0.0
    for position in range(engine.num_pending):
        slot = lookahead.pending[queues.at(engine.pending_head, position, len(lookahead.pending))]
        lookahead.requests[slot].serial = NONE
    engine.num_pending = 0


@kernel
def add_joined(source: State, lookahead: State) -> None:
    """Add the requests at the tail of an engine's queue that its lookahead does not contain yet."""
    first_new = source.engine[0].num_waiting
    while first_new > 0:
        slot = queues.waiting_at(source, first_new - 1)
        if lookahead.requests[slot].serial == source.requests[slot].serial:
            break
        first_new -= 1
    for position in range(first_new, source.engine[0].num_waiting):
        slot = queues.waiting_at(source, position)
        lookahead.requests[slot] = source.requests[slot]
        queues.join(lookahead, slot)


@kernel
def forecast(
    fleet: EngineArrays, requests: Requests, workspace: State, number: int, indices: np.ndarray, now_s: float,
    with_delays: bool, until: int, min_slack_s: float, leg: int, in_s: float, results: np.ndarray,
) -> None:  # fmt: skip
    """Forecast a request, or a leg of it, that arrives in `in_s` at each of some engines, as their sidecars would.

    With delays it may be simulated only `until` it is known which deadlines are kept, with `min_slack_s` to spare, and
    without them only to its first token.
    """
    slot = CANDIDATE
    for row in range(len(indices)):
        index = indices[row]
        source = engine_at(fleet.stack, fleet.predicted_costs, index)
        fill_slot(fleet, requests, index, slot, number, now_s + in_s)
        entry = fleet.slots[index, slot]
        entry.log_median, entry.spread = requests.facts[number].log_median, requests.facts[number].spread
        if leg == PREFILL_LEG:
            as_prefill_leg(source.requests[slot], fleet.instances[index].lease_s)
        elif leg == DECODE_LEG:
            as_decode_leg(source.requests[slot])
        apply_tag(fleet, source.requests[slot], entry)
        before, without_it = layer(workspace, source, BEFORE), layer(workspace, source, WITHOUT)
        with_it = layer_of(workspace, source, index, WITH)
        known = copy_for_forecast(fleet, workspace, index, before if with_delays else with_it, now_s, with_delays)
        copy_blocks(with_it, known)
        if with_delays:
            copy_requests(with_it, before)
        else:
            stop_counting_on_time(with_it)
        if with_delays and until == TO_THE_END:
            copy_requests(without_it, before)
            copy_blocks(without_it, known)
            loop.run(without_it, FOREVER, ANY_NUMBER, NONE)
        with_it.requests[slot] = source.requests[slot]
        queues.announce(with_it, slot)
        if with_delays and until != TO_THE_END:
            find_verdict(before, known, without_it, with_it, slot, now_s, until, min_slack_s, False, results[row])
            continue
        if until == FIRST_TOKEN and not with_delays:
            reach_first_token(with_it, slot, FOREVER)
            read_result(with_it, slot, now_s, results[row])
            if results[row].first_token_s < np.inf:
                hide_unknown(results[row])
            continue
        loop.run(with_it, FOREVER, ANY_NUMBER, NONE if with_delays else slot)
        read_result(with_it, slot, now_s, results[row])
        if with_delays:
            compare(before, before, without_it, with_it, slot, results[row])


@kernel
def forecast_drain(fleet: EngineArrays, workspace: State, now_s: float, drained_s: np.ndarray) -> None:
    """Forecast for each engine when all its requests have finished."""
    for index in range(len(fleet.instances)):
        source = engine_at(fleet.stack, fleet.predicted_costs, index)
        copied = layer_of(workspace, source, index, WITH)
        copy_blocks(copied, copy_for_forecast(fleet, workspace, index, copied, now_s, False))
        loop.run(copied, FOREVER, ANY_NUMBER, NONE)
        drained_s[index] = max(0.0, copied.engine[0].now_s - now_s)


forecast_directly, forecast_drain_directly = direct(forecast), direct(forecast_drain)
