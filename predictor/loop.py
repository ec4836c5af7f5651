"""The engine's loop: schedule, launch, retire; step by step, or from event to event."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numba.core import types

from predictor import queues, remote_kv, steps
from predictor.batching import fill
from predictor.compiled import inner_kernel, kernel, small_kernel
from predictor.kept_deadlines import keeps_all
from predictor.kernel_addresses import by_address
from predictor.repeated_steps import count_repeats, repeat
from predictor.request import NO_ADAPTER
from predictor.state import AT_SETBACK, FINISHED, NEVER, State
from predictor.state_allocation import state_type

FOREVER = math.inf
ANY_NUMBER = 1 << 62  # the last step of a run that no number of steps ends
TAIL_OF_QUEUE = -2  # watched: stop before a step that could admit a request behind all that wait now


def loop_with(schedule: Callable[[State], bool]) -> Callable[[State, float, int, int], None]:
    """Return the loop that plans its steps with a local scheduler."""

    def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
        while reach_plan(state, until_s, last_step, watched):
            state.engine[0].steady_limit_s = np.inf
            state.engine[0].steady = schedule(state)
            send(state)

    return drive


_drive = inner_kernel(loop_with(fill))


@kernel
def drive(state: State, until_s: float, last_step: int, watched: int) -> None:
    """Run the engine until no event is left before `until_s`, `last_step` is launched, or the watched request ends."""
    _drive(state, until_s, last_step, watched)


_call_drive = by_address("loop", [drive], types.none, lambda: (state_type(), types.float64, types.int64, types.int64))


@inner_kernel
def run(state: State, until_s: float, last_step: int, watched: int) -> None:
    """Do as `drive`, for kernels that are to be compiled without it."""
    _call_drive(0, state, until_s, last_step, watched)


@kernel
def reach_plan(state: State, until_s: float, last_step: int, watched: int) -> bool:
    """Run the engine until a step must be planned; return False where the run ends before.

    Mirrors vLLM 0.32 `EngineCore.step` (pipeline depth 1) and `step_with_batch_queue` (depth 2): a step is planned
    whenever the pipeline has room and a request is unfinished; else the engine waits for the oldest step.
    """
    engine = state.engine[0]
    while engine.num_steps < last_step:
        remote_kv.absorb_transfers(state)
        queues.absorb_arrivals(state)
        if is_over(state, watched):
            return False
        has_room = engine.num_in_flight < engine.pipeline_depth - engine.awaits_step
        if watched == TAIL_OF_QUEUE and has_room and not has_tail_ahead(state):
            return False  # a request at the tail would be in the step that is planned here
        unfinished = engine.num_running + engine.num_waiting
        if unfinished > 0 and not engine.stuck and has_room:
            repeats = engine.steady and engine.num_in_flight == engine.pipeline_depth - 1
            if engine.now_s > until_s or (repeats and is_kept_for_good(state)):
                return False
            if repeats:
                num_repeats = min(count_repeats(state, until_s), last_step - engine.num_steps)
                if num_repeats > 0:
                    repeat(state, num_repeats)
                    continue
            steps.begin(state)
            return True
        if engine.num_in_flight > 0:
            if state.steps[engine.oldest].end_s > until_s:
                return False
            steps.retire(state)
        else:
            next_s = next_event_s(state, until_s)
            if next_s == np.inf or next_s > until_s:
                return False
            engine.now_s = max(engine.now_s, next_s)
    return False


@small_kernel
def is_over(state: State, watched: int) -> bool:
    """Return whether the watched request has ended, or a run that stops at setbacks has had one, or little slack."""
    engine = state.engine[0]
    if engine.stops == AT_SETBACK and (engine.num_setbacks > 0 or has_little_slack(state)):
        return True
    return bool(watched >= 0 and state.requests[watched].status == FINISHED)


@small_kernel
def has_little_slack(state: State) -> bool:
    """Return whether a token has come with less than `min_slack_s` to spare; never where that is 0."""
    engine = state.engine[0]
    return bool(engine.min_slack_s > 0 and engine.least_slack_s < engine.min_slack_s)


@small_kernel
def is_kept_for_good(state: State) -> bool:
    """Note whether certainly no setback follows the steady steps that are to come, in a run that ends there."""
    if state.engine[0].stops != NEVER and keeps_all(state):
        state.engine[0].is_kept = 1
    return bool(state.engine[0].is_kept)


@small_kernel
def next_event_s(state: State, until_s: float) -> float:
    """Return when an idle engine has something to do; infinity where that concerns no request, and no time is asked."""
    engine = state.engine[0]
    if until_s == np.inf and engine.num_waiting + engine.num_pending == 0:
        return np.inf  # at most, blocks of finished prefills are held
    return queues.next_event_s(state)


@small_kernel
def has_tail_ahead(state: State) -> bool:
    """Return whether more requests wait than the next step can admit, so that it cannot reach the tail of the queue.

    A local scheduler that orders the queue can admit from its tail, and plans by all that wait.
    """
    engine = state.engine[0]
    num_seats = engine.max_num_seqs - engine.num_running
    if engine.orders_queue or engine.num_waiting <= num_seats:
        return False
    return not (engine.fetches or engine.max_loras > 0) or num_waiting_for_seats(state) > num_seats


@kernel
def num_waiting_for_seats(state: State) -> int:
    """Return how many waiting requests certainly run once the scheduler reaches them.

    The others fetch their KV blocks first, or may be passed over because of their adapters.
    """
    count, has_adapters = 0, state.engine[0].max_loras > 0
    for position in range(state.engine[0].num_waiting):
        slot = queues.waiting_at(state, position)
        may_be_passed = has_adapters and state.facts[slot].adapter != NO_ADAPTER
        count += remote_kv.takes_seat(state, slot) and not may_be_passed
    return count


@small_kernel
def nothing_will_change(state: State) -> bool:
    """Return whether the planned step is empty and no step in flight will free a slot or a block."""
    engine = state.engine[0]
    step = state.steps[steps.current(state)]
    if step.num_scheduled > 0 or step.num_preempted > 0:
        return False
    return engine.num_in_flight == 0 or state.steps[engine.oldest].num_scheduled == 0


@small_kernel
def send(state: State) -> None:
    """Launch the planned step, unless it is empty and only an arrival, or the end of a step, can change that."""
    engine = state.engine[0]
    if nothing_will_change(state):
        engine.stuck = 1
    elif engine.is_sglang and engine.num_in_flight > 0 and state.steps[steps.current(state)].num_scheduled == 0:
        engine.awaits_step = 1
    else:
        steps.launch(state)
