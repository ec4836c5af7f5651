"""Whether an engine keeps its deadlines with one more request, and those of the request: simulated until it is known.

A forecast of times runs until all requests have ended. Whether a deadline is missed is mostly known much sooner: at the
first that is, or when all prefills have ended and no decode step to come can be too long.
"""

from __future__ import annotations

import numpy as np

from predictor import loop, queues
from predictor.compiled import kernel, small_kernel
from predictor.forecast import attains, read_result
from predictor.forecast_result import ALL_KEPT
from predictor.loop import ANY_NUMBER, FOREVER
from predictor.state import AT_SETBACK, FINISHED, NEVER, NONE, WHEN_KEPT, State
from predictor.state_copies import copy_into

FEW_STEPS = 8
AFTER_S = 1e-6  # after its deadline, at least, comes a first token that the simulation has not reached
ENDED, OWN_MISSED, SETBACK, LITTLE_SLACK = range(4)  # why a run has stopped


@kernel
def find_verdict(
    before: State, alone: State, after: State, slot: int, now_s: float, until: int, min_slack_s: float,
    result: np.record,
) -> None:  # fmt: skip
    """Simulate a request that was announced to `after`, a copy of `before`, until the verdict is known.

    With `ALL_KEPT` that is also when the request itself misses a deadline or is preempted. The time of its first token
    is then found as well, or at least that it is after its deadline. What remains unknown is NaN, and of the others it
    is known only whether any is harmed. With `min_slack_s` it ends as soon as there is less slack, whoever is harmed.
    """
    engine = after.engine[0]
    engine.stops, engine.min_slack_s = AT_SETBACK, min_slack_s
    due_s = FOREVER
    if until == ALL_KEPT and after.requests[slot].tokens_on_time >= 0:
        due_s = after.requests[slot].arrival_s + after.facts[slot].ttft_slo_s
    result.others_missed = result.others_preempted = 0
    has_alone = False
    stopped = SETBACK
    while stopped == SETBACK and result.others_missed <= 0 and result.others_preempted <= 0:
        stopped = run_on(after, slot, due_s, until == ALL_KEPT)
        never_ends = engine.num_running + engine.num_waiting > 0 and not engine.is_kept
        if stopped == SETBACK or (stopped == ENDED and never_ends):
            if not has_alone:
                copy_into(alone, before)
                alone.engine[0].stops = WHEN_KEPT
                loop.run(alone, FOREVER, ANY_NUMBER, NONE)
                has_alone = True
            result.others_missed = num_harmed(before, alone, after)
            result.others_preempted = num_others_preempted(alone, after, slot)
    if stopped != ENDED:
        reach_first_token(after, slot, due_s)
    others_missed, others_preempted = result.others_missed, result.others_preempted
    read_result(after, slot, now_s, result)
    result.attained = keeps(after, slot)
    result.others_missed, result.others_preempted = others_missed, others_preempted
    result.least_slack_s = engine.least_slack_s
    if stopped != ENDED or engine.is_kept:
        hide_unknown(result)
        if after.requests[slot].first_token_s < 0 and due_s < FOREVER:
            result.first_token_s = due_s - now_s + AFTER_S


@kernel
def run_on(state: State, slot: int, due_s: float, own_counts: bool) -> int:
    """Run until the next setback, or until the request is known to be late if that counts; return why it stopped."""
    engine, request = state.engine[0], state.requests[slot]
    engine.num_setbacks = 0
    if request.first_token_s < 0 and due_s < FOREVER:
        loop.run(state, due_s, ANY_NUMBER, NONE)
        if engine.num_setbacks == 0 and not engine.is_kept and request.first_token_s < 0:
            return OWN_MISSED
    if engine.num_setbacks == 0 and not engine.is_kept:
        loop.run(state, FOREVER, ANY_NUMBER, NONE)
    if own_counts and (has_missed(state, slot) or request.num_preemptions > 0):
        return OWN_MISSED
    if loop.has_little_slack(state):
        return LITTLE_SLACK
    return SETBACK if engine.num_setbacks > 0 else ENDED


@kernel
def reach_first_token(state: State, slot: int, due_s: float) -> None:
    """Run on until a request has its first token, but not beyond its deadline."""
    engine, request = state.engine[0], state.requests[slot]
    engine.stops = NEVER
    num_steps = NONE
    while request.first_token_s < 0 and num_steps < engine.num_steps and due_s < FOREVER:
        num_steps = engine.num_steps
        loop.run(state, due_s, num_steps + FEW_STEPS, NONE)


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
    """Return whether a token of a request has come after its deadline."""
    request = state.requests[slot]
    if request.tokens_on_time < 0:
        return False
    last = 1 if np.isnan(state.facts[slot].tpot_slo_s) else request.output_tokens
    return bool(request.tokens_on_time < min(request.output_tokens, last))


@small_kernel
def keeps(state: State, slot: int) -> bool:
    """Return whether a request attains all deadlines, at the end of a run or where all are certainly kept."""
    request = state.requests[slot]
    if request.status != FINISHED and request.tokens_on_time >= 0 and state.engine[0].is_kept:
        return not has_missed(state, slot)
    return attains(state, slot)


@kernel
def num_harmed(before: State, alone: State, after: State) -> int:
    """Count the requests that miss a deadline in `after` and none in `alone`."""
    engine = before.engine[0]
    count = 0
    for position in range(engine.num_running):
        count += is_harmed(alone, after, before.running[position])
    for position in range(engine.num_waiting):
        count += is_harmed(alone, after, queues.waiting_at(before, position))
    for position in range(engine.num_pending):
        count += is_harmed(alone, after, before.pending[queues.at(engine.pending_head, position, len(before.pending))])
    return count


@small_kernel
def is_harmed(alone: State, after: State, slot: int) -> bool:
    """Return whether a request misses a deadline in `after` and none in `alone`."""
    if after.engine[0].num_setbacks > 0:
        return has_missed(after, slot) and keeps(alone, slot)
    return not keeps(after, slot) and keeps(alone, slot)


@small_kernel
def num_others_preempted(alone: State, after: State, slot: int) -> int:
    """Return how many more preemptions others have than without the request."""
    return after.engine[0].num_preemptions - alone.engine[0].num_preemptions - after.requests[slot].num_preemptions
