"""Whether an engine keeps its deadlines with one more request, and those of the request: simulated until it is known.

A forecast of times runs until all requests have ended. Whether a deadline is missed is mostly known much sooner: at the
first that is, when all prefills have ended and no decode step to come can be too long, or when only requests are left
that are late already.
"""

from __future__ import annotations

import numpy as np

from predictor import loop, queues, steps
from predictor.compiled import direct, kernel, small_kernel
from predictor.forecast_kernels import (
    ALONE,
    HAS_TOKENS_ON_TIME,
    IS_MISSING,
    SHARED,
    WITH_CANDIDATE,
    announce_all,
    attains,
    read_result,
    share_start,
)
from predictor.forecast_result import ALL_KEPT, OTHERS_KEPT, OTHERS_KEPT_AND_START
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.state import AT_SETBACK, FINISHED, NEVER, NONE, State
from predictor.state_copies import copy_blocks, copy_into, copy_requests, layer

FEW_STEPS = 8
AFTER_S = 1e-6  # after its deadline, at least, comes a first token that the simulation has not reached
ENDED, OWN_MISSED, SETBACK, LITTLE_SLACK = range(4)  # why a run has stopped


@kernel
def simulate_verdicts(
    source: State, workspace: State, slots: np.ndarray, now_s: float, min_slack_s: float, ready: np.ndarray,
    results: np.ndarray,
) -> None:  # fmt: skip
    """Simulate the engine with each candidate to its end, and until it is known whether another misses a deadline."""
    shared = layer(workspace, source, SHARED)
    share_start(source, shared, now_s, ready, HAS_TOKENS_ON_TIME)
    alone, after = layer(workspace, source, ALONE), layer(workspace, source, WITH_CANDIDATE)
    for candidate in range(len(slots)):
        slot = slots[candidate]
        copy_into(after, shared)
        announce_all(after, source, slots, candidate, candidate + 1)
        find_verdict(shared, shared, alone, after, slot, now_s, OTHERS_KEPT, min_slack_s, True, results[candidate])
        ready[ALONE] = IS_MISSING


simulate_verdicts_directly = direct(simulate_verdicts)


@kernel
def find_verdict(
    before: State, known: State, alone: State, after: State, slot: int, now_s: float, until: int, min_slack_s: float,
    to_its_end: bool, result: np.record,
) -> None:  # fmt: skip
    """Simulate a request that was announced to `after`, a copy of `before`, until the verdict is known.

    Blocks of `before` are read in `known`; `alone` is room for a run without the request.

    With `ALL_KEPT` that is also when the request itself misses a deadline or is preempted. The time of its first token
    is then found as well, or at least that it is after its deadline. What remains unknown is NaN, and of the others it
    is known only whether any is harmed. With `min_slack_s` it ends as soon as there is less slack, whoever is harmed.
    Preemptions count until all requests that can keep their deadlines have ended: later ones make nobody late. A late
    request is not simulated further for its own sake, but to its start with `OTHERS_KEPT_AND_START`, as one without
    deadlines is with `ALL_KEPT`, and in any case to its end with `to_its_end`, so that all its times are known.
    """
    engine = after.engine[0]
    engine.stops, engine.min_slack_s = AT_SETBACK, min_slack_s
    stop_counting_late(after, slot)
    due_s = FOREVER
    if until == ALL_KEPT and after.requests[slot].tokens_on_time >= 0:
        due_s = after.requests[slot].arrival_s + after.facts[slot].ttft_slo_s
    result.others_missed = result.others_preempted = 0
    has_alone = False
    stopped = SETBACK
    while stopped == SETBACK and result.others_missed <= 0 and result.others_preempted <= 0:
        stopped = run_on(after, slot, due_s, until == ALL_KEPT)
        if stopped == SETBACK or (stopped == ENDED and may_have_harmed(before, after)):
            if not has_alone:
                copy_requests(alone, before)
                copy_blocks(alone, known)
                stop_counting_late(alone, NONE)
                run_until_kept(alone)
                has_alone = True
            result.others_missed = num_harmed(before, alone, after)
            result.others_preempted = num_others_preempted(alone, after, slot)
            if result.others_missed == 0:
                stop_counting_late(after, slot)
    others_missed, others_preempted, least_slack_s = result.others_missed, result.others_preempted, engine.least_slack_s
    if to_its_end:
        engine.stops, engine.is_kept = NEVER, 0
        loop.run(after, FOREVER, ANY_NUMBER, slot)
    elif stopped != ENDED and due_s < FOREVER:
        reach_first_token(after, slot, due_s)
    elif until == OTHERS_KEPT_AND_START or (until == ALL_KEPT and due_s == FOREVER):
        reach_start(after, slot)
    read_result(after, slot, now_s, result)
    result.attained = keeps(after, slot)
    result.others_missed, result.others_preempted = others_missed, others_preempted
    result.least_slack_s = least_slack_s
    if not to_its_end and (stopped != ENDED or engine.is_kept):
        hide_unknown(result)
        if after.requests[slot].first_token_s < 0 and due_s < FOREVER:
            result.first_token_s = due_s - now_s + AFTER_S


@kernel
def stop_counting_late(state: State, but: int) -> None:
    """Count the tokens on time of no request that can miss a deadline no more, nor keep all; `but` for one of them."""
    for place in range(queues.num_present(state)):
        slot = queues.present_at(state, place)
        if slot != but and not can_miss(state, slot):
            state.requests[slot].tokens_on_time = NONE


@kernel
def run_on(state: State, slot: int, due_s: float, own_counts: bool) -> int:
    """Run until the next setback, or until the request is known to be late if that counts; return why it stopped."""
    engine, request = state.engine[0], state.requests[slot]
    engine.num_setbacks = 0
    if request.first_token_s < 0 and due_s < FOREVER:
        loop.run(state, due_s, ANY_NUMBER, NONE)
        if engine.num_setbacks == 0 and not engine.is_kept and request.first_token_s < 0:
            return OWN_MISSED
    run_to_setback(state)
    if own_counts and (has_missed(state, slot) or request.num_preemptions > 0):
        return OWN_MISSED
    if loop.has_little_slack(state):
        return LITTLE_SLACK
    return SETBACK if engine.num_setbacks > 0 else ENDED


@kernel
def run_until_kept(state: State) -> None:
    """Run until no request can miss a deadline any more, or to the end."""
    engine = state.engine[0]
    engine.stops, engine.num_setbacks = AT_SETBACK, 1
    while engine.num_setbacks > 0:
        engine.num_setbacks = 0
        run_to_setback(state)


@kernel
def run_to_setback(state: State) -> None:
    """Run until a setback, until none is possible any more, which is noted as `is_kept`, or to the end.

    None is possible once all requests that could miss a deadline have ended; the others, which are late, may go on for
    much longer.
    """
    engine = state.engine[0]
    num_steps = NONE
    while engine.num_setbacks == 0 and not engine.is_kept and not loop.has_little_slack(state):
        if num_steps == engine.num_steps:
            return  # nothing happens any more
        num_steps = engine.num_steps
        due_s = last_first_deadline_s(state)
        last = last_to_end(state)
        if due_s > 0:
            reach_first_deadlines(state, due_s)
        elif last != NONE:
            loop.run(state, FOREVER, ANY_NUMBER, last)
        else:
            engine.is_kept = 1


@kernel
def reach_first_deadlines(state: State, due_s: float) -> None:
    """Run until all first tokens that are due by then have come, or are certainly late, which is a setback.

    An engine on which nothing happens any more has none: who waits for a setback would wait forever.
    """
    engine = state.engine[0]
    first_step = engine.num_steps
    loop.run(state, due_s, ANY_NUMBER, NONE)
    num_steps = NONE
    while num_steps < engine.num_steps and engine.now_s <= due_s and last_first_deadline_s(state) > 0:
        if engine.num_setbacks > 0 or engine.is_kept or loop.has_little_slack(state):
            return
        num_steps = engine.num_steps
        loop.run(state, FOREVER, num_steps + 1, NONE)
    if engine.num_steps == first_step:
        return
    for place in range(queues.num_present(state)):
        slot = queues.present_at(state, place)
        engine.num_setbacks += state.requests[slot].output_tokens == 0 and has_missed(state, slot)


@kernel
def last_first_deadline_s(state: State) -> float:
    """Return when the last first token is due that can come in time; 0 where there is none."""
    last_s = 0.0
    for place in range(queues.num_present(state)):
        slot = queues.present_at(state, place)
        if state.requests[slot].output_tokens == 0 and can_miss(state, slot):
            last_s = max(last_s, steps.due_s(state, slot, 1))
    return last_s


@kernel
def last_to_end(state: State) -> int:
    """Return the request with the most tokens left among those that have started and can miss a deadline, or NONE."""
    most_left, last = 0, NONE
    for place in range(queues.num_present(state)):
        slot = queues.present_at(state, place)
        num_left = state.requests[slot].final_tokens - state.requests[slot].output_tokens
        if num_left > most_left and state.requests[slot].output_tokens > 0 and can_miss(state, slot):
            last, most_left = slot, num_left
    return last


@small_kernel
def can_miss(state: State, slot: int) -> bool:
    """Return whether a request has kept all its deadlines so far, and can still keep or miss the next one."""
    request = state.requests[slot]
    if request.tokens_on_time < 0 or request.tokens_on_time < request.output_tokens:
        return False
    return bool(steps.due_s(state, slot, request.output_tokens + 1) >= state.engine[0].now_s)  # False for NaN


@kernel
def reach_first_token(state: State, slot: int, until_s: float) -> None:
    """Run on until a request has its first token, but not beyond a time."""
    engine, request = state.engine[0], state.requests[slot]
    engine.stops = NEVER
    num_steps = NONE
    while request.first_token_s < 0 and num_steps < engine.num_steps:
        num_steps = engine.num_steps
        loop.run(state, until_s, num_steps + FEW_STEPS, NONE)


@kernel
def reach_start(state: State, slot: int) -> None:
    """Run on until a request is scheduled, or nothing happens any more."""
    engine, request = state.engine[0], state.requests[slot]
    is_kept = engine.is_kept
    engine.stops, engine.is_kept = NEVER, 0
    num_steps = NONE
    while request.scheduled_s < 0 and num_steps < engine.num_steps:
        num_steps = engine.num_steps
        loop.run(state, FOREVER, num_steps + FEW_STEPS, NONE)
    engine.is_kept = is_kept


@small_kernel
def hide_unknown(result: np.record) -> None:
    """Replace the times that the simulation has not reached by NaN."""
    if result.scheduled_s == np.inf:
        result.scheduled_s = np.nan
    if result.first_token_s == np.inf:
        result.first_token_s = np.nan
    if result.finished_s == np.inf:
        result.finished_s = np.nan


@small_kernel
def has_missed(state: State, slot: int) -> bool:
    """Return whether a token of a request has come after its deadline, or cannot come before it any more."""
    request = state.requests[slot]
    if request.tokens_on_time < 0:
        return False
    last = 1 if np.isnan(state.facts[slot].tpot_slo_s) else request.output_tokens
    if request.tokens_on_time < min(request.output_tokens, last):
        return True
    is_overdue = steps.due_s(state, slot, request.output_tokens + 1) < state.engine[0].now_s
    return bool(request.status != FINISHED and is_overdue)


@small_kernel
def keeps(state: State, slot: int) -> bool:
    """Return whether a request attains all deadlines, at the end of a run or where all are certainly kept."""
    request = state.requests[slot]
    if request.status != FINISHED and request.tokens_on_time >= 0 and state.engine[0].is_kept:
        return not has_missed(state, slot)
    return attains(state, slot)


@kernel
def may_have_harmed(before: State, after: State) -> bool:
    """Return whether a request has missed a deadline at the end of a run, or never ends."""
    engine = after.engine[0]
    if engine.num_running + engine.num_waiting > 0 and not engine.is_kept:
        return True
    num_missed = 0
    for place in range(queues.num_present(before)):
        num_missed += has_missed(after, queues.present_at(before, place))
    return num_missed > 0


@kernel
def num_harmed(before: State, alone: State, after: State) -> int:
    """Count the requests that miss a deadline in `after` and none in `alone`."""
    count = 0
    for place in range(queues.num_present(before)):
        count += is_harmed(alone, after, queues.present_at(before, place))
    return count


@small_kernel
def is_harmed(alone: State, after: State, slot: int) -> bool:
    """Return whether a request misses a deadline in `after` and none in `alone`."""
    if after.engine[0].num_setbacks > 0:
        return has_missed(after, slot) and keeps(alone, slot)
    return not keeps(after, slot) and keeps(alone, slot)


@kernel
def num_others_preempted(alone: State, after: State, slot: int) -> int:
    """Return how many more preemptions others have than without the request, in at least as much time."""
    own, engine = after.requests[slot].num_preemptions, alone.engine[0]
    more = after.engine[0].num_preemptions - own - engine.num_preemptions
    if more > 0 and engine.now_s < after.engine[0].now_s:
        is_kept = engine.is_kept
        engine.stops, engine.is_kept = NEVER, 0
        loop.run(alone, after.engine[0].now_s, ANY_NUMBER, NONE)
        engine.is_kept = is_kept
        more = after.engine[0].num_preemptions - own - engine.num_preemptions
    return int(more)
