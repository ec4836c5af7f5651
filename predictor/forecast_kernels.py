"""The simulations of forecasts: an engine with a request and without it, and what they say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from predictor import loop, queues
from predictor.compiled import direct, inner_kernel, kernel, small_kernel
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.state import DECODE_LEG, FINISHED, NO_TRANSFER, NONE, State
from predictor.state_copies import copy_into, layer

RESULT = np.dtype(
    [
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("delay_sum_s", "f8"),
        ("delay_worst_s", "f8"),
        ("fetched_s", "f8"),  # NaN where nothing is fetched
        ("gain_before", "f8"),
        ("gain_after", "f8"),
        ("least_slack_s", "f8"),
        ("unmeasured", "f8"),
        ("output_tokens", "i8"),
        ("num_preemptions", "i8"),
        ("others_preempted", "i8"),
        ("hit_tokens", "i8"),
        ("attained", "i8"),
        ("others_missed", "i8"),
    ],
    align=True,
)

SHARED, ALONE, WITH_CANDIDATE = 0, 1, 2  # the layers of the workspace
IS_MISSING, HAS_TIMES, HAS_TOKENS_ON_TIME = 0, 1, 2  # what a layer is ready for


@small_kernel
def stop_counting_on_time(state: State) -> None:
    """Count the tokens on time of no request that is there: without delays only the candidate's are asked for."""
    for place in range(queues.num_present(state)):
        state.requests[queues.present_at(state, place)].tokens_on_time = NONE


def start_with(drive: Callable[..., None]) -> Callable[..., None]:
    """Return what runs an engine by `drive` up to the first step that could admit a candidate, where that is known."""

    def share(source: State, shared: State, now_s: float, ready: np.ndarray, purpose: int) -> None:
        if ready[SHARED] >= purpose:
            return
        copy_into(shared, source)
        if purpose == HAS_TIMES:
            stop_counting_on_time(shared)
        shared.engine[0].least_slack_s = np.inf
        shared.engine[0].unmeasured_s = 0.0
        if not shared.engine[0].by_priority and queues.last_arrival_s(shared) <= now_s:
            drive(shared, FOREVER, ANY_NUMBER, loop.TAIL_OF_QUEUE)
            ready[SHARED] = purpose

    return share


share_start = inner_kernel(start_with(loop.run))


def simulation_with(
    drive: Callable[..., None], share: Callable[..., None], layer: Callable[[State, State, int], State]
) -> Callable[..., None]:
    """Return the simulation of candidates that runs engines by `drive`, up to the first candidate by `share`.

    `layer` returns one copy of the workspace.

    `ends` says where the slots of each candidate end; the result of its first slot has what it does to others.
    """

    def simulate(
        source: State,
        workspace: State,
        slots: np.ndarray,
        ends: np.ndarray,
        now_s: float,
        delays: bool,
        ready: np.ndarray,
        results: np.ndarray,
    ) -> None:
        shared = layer(workspace, source, SHARED)
        purpose = HAS_TOKENS_ON_TIME if delays else HAS_TIMES
        share(source, shared, now_s, ready, purpose)
        alone = layer(workspace, source, ALONE)
        if delays and ready[ALONE] < purpose:
            copy_into(alone, shared)
            drive(alone, FOREVER, ANY_NUMBER, NONE)
            ready[ALONE] = purpose
        after = layer(workspace, source, WITH_CANDIDATE)
        first = 0
        for candidate in range(len(ends)):
            end = ends[candidate]
            copy_into(after, shared)
            if purpose < ready[SHARED]:
                stop_counting_on_time(after)
            announce_all(after, source, slots, first, end)
            for position in range(first, first + 1 if delays else end):
                drive(after, FOREVER, ANY_NUMBER, NONE if delays else slots[position])
            for position in range(first, end):
                read_result(after, slots[position], now_s, results[position])
            if delays:
                compare(source, shared, alone, after, slots[first], results[first])
                count_others_of_group(after, slots, first, end, results[first])
            first = end

    return simulate


_simulate = inner_kernel(simulation_with(loop.run, share_start, layer))


@kernel
def simulate(
    source: State,
    workspace: State,
    slots: np.ndarray,
    ends: np.ndarray,
    now_s: float,
    delays: bool,
    ready: np.ndarray,
    results: np.ndarray,
) -> None:
    """Simulate the engine with each candidate, and record what the candidate experiences."""
    _simulate(source, workspace, slots, ends, now_s, delays, ready, results)


simulate_directly = direct(simulate)


@kernel
def read_result(after: State, slot: int, now_s: float, result: np.record) -> None:
    """Record what the candidate has experienced."""
    request = after.requests[slot]
    result.scheduled_s = request.scheduled_s - now_s if request.scheduled_s >= 0 else np.inf
    result.first_token_s = request.first_token_s - now_s if request.first_token_s >= 0 else np.inf
    result.finished_s = request.finished_s - now_s if request.status == FINISHED else np.inf
    result.fetched_s = np.nan
    if request.leg == DECODE_LEG:
        result.fetched_s = request.transfer_s - now_s if request.stage == NO_TRANSFER else np.inf
    result.output_tokens = request.final_tokens
    result.num_preemptions = request.num_preemptions
    result.hit_tokens = request.hit_tokens
    result.attained = attains(after, slot)
    simulated_s = after.engine[0].now_s - now_s
    result.unmeasured = min(1.0, after.engine[0].unmeasured_s / simulated_s) if simulated_s > 0 else 0.0


@small_kernel
def attains(state: State, slot: int) -> bool:
    """Return whether all tokens of a response have come by their deadlines; one without deadlines attains them."""
    request = state.requests[slot]
    if request.tokens_on_time < 0:
        return True
    num_due = 1 if np.isnan(state.facts[slot].tpot_slo_s) else request.final_tokens
    return bool(request.status == FINISHED and request.tokens_on_time >= num_due)


@kernel
def compare(source: State, shared: State, alone: State, after: State, slot: int, result: np.record) -> None:
    """Record what the candidate does to the others: delays, preemptions, missed deadlines and gain."""
    result.delay_sum_s = result.delay_worst_s = result.gain_before = result.gain_after = 0.0
    result.others_missed = 0
    for place in range(queues.num_present(source)):
        _compare_one(source, shared, alone, after, queues.present_at(source, place), result)
    result.gain_after += gain_of(after, slot, 0)
    result.least_slack_s = after.engine[0].least_slack_s
    preemptions = after.engine[0].num_preemptions - alone.engine[0].num_preemptions
    result.others_preempted = preemptions - after.requests[slot].num_preemptions


@kernel
def announce_all(after: State, source: State, slots: np.ndarray, first: int, end: int) -> None:
    """Add the requests of a candidate, which arrive in their order."""
    for position in range(first, end):
        slot = slots[position]
        after.requests[slot] = source.requests[slot]
        queues.announce(after, slot)


@kernel
def count_others_of_group(after: State, slots: np.ndarray, first: int, end: int, result: np.record) -> None:
    """Count further requests of a candidate: their gain, and that their preemptions are not those of others."""
    for position in range(first + 1, end):
        result.gain_after += gain_of(after, slots[position], 0)
        result.others_preempted -= after.requests[slots[position]].num_preemptions


@small_kernel
def gain_of(state: State, slot: int, before: int) -> float:
    """Return the value of a request's tokens that came by their deadlines, of those after the first `before`."""
    request = state.requests[slot]
    return state.facts[slot].weight * (request.tokens_on_time - before) if request.tokens_on_time > before else 0.0


@kernel
def _compare_one(source: State, shared: State, alone: State, after: State, slot: int, result: np.record) -> None:
    on_time = max(0, source.requests[slot].tokens_on_time)
    if shared.requests[slot].status == FINISHED:  # it ended before the candidate arrived, and the copies leave it out
        gain = gain_of(shared, slot, on_time)
        result.gain_before += gain
        result.gain_after += gain
        return
    result.gain_before += gain_of(alone, slot, on_time)
    result.gain_after += gain_of(after, slot, on_time)
    result.others_missed += attains(alone, slot) and not attains(after, slot)
    if alone.requests[slot].status != FINISHED:
        return  # it never ends without the candidate either
    delay_s = np.inf
    if after.requests[slot].status == FINISHED:
        delay_s = after.requests[slot].finished_s - alone.requests[slot].finished_s
    result.delay_sum_s += delay_s
    result.delay_worst_s = max(result.delay_worst_s, delay_s)
